"""Which backend each kernel runs on: what flags ask for, and what a test at the start finds."""
