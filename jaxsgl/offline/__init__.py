"""`jaxsgl.LLM`: an engine in the caller's process."""
