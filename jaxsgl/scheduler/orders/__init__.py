"""What operators order of a running engine: pauses, flushes, profiles, adapters, weights, and looks into it."""
