"""Several front-end processes of one server (`--tokenizer-worker-num`): their parent, and what they say to it."""
