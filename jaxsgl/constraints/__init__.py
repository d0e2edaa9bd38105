"""Grammars compiled by llguidance: which tokens may come next. Knows no requests, no batches and no device."""
