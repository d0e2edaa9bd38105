"""Pictures and videos of prompts: fetched within limits, decoded, and made ready for the engine."""
