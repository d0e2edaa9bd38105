"""OpenAI's HTTP API: completions, chat, models; and the tokenizer's endpoints of vLLM and SGLang."""
