"""From files of pictures and videos to `MediaItem`s, without torch. Front end and `LLM` use it; knows no protocol."""
