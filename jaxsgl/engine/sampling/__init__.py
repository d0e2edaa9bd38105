"""From logits to tokens, inside jitted programs: filters, masks, choices, and what is returned besides."""
