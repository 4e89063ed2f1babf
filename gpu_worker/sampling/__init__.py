"""From logits to tokens, with counter-based random numbers."""
