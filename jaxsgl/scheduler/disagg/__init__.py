"""Prefill and decode in different workers: who waits for whom, and what memory they may take. No threads, no device."""
