"""Speculative decoding as the scheduler sees it: drafts are proposed, verified by a step, and judged."""
