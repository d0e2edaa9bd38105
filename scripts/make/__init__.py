"""What the repository keeps and a command makes: `python scripts/make NAME` runs `main` of the module of that name."""
