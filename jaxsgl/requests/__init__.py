"""What a client asks for, as values with their checks: the front end and `LLM` make them, the scheduler reads them."""
