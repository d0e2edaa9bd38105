"""The engine as pipeline stages (`--pp-size`), and what their programs have of their own."""
