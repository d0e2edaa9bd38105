"""What a server measures, and how it is shown."""
