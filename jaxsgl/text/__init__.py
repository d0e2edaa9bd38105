"""Text to token ids and back: what servers and offline use share. Imports neither JAX nor the front end."""
