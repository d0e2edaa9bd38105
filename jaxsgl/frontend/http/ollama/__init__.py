"""Ollama's HTTP API: what Open WebUI, Continue, langchain-ollama and the `ollama` clients speak."""
