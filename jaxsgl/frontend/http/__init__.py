"""The HTTP port: OpenAI's API, SGLang's endpoints, health and metrics."""
