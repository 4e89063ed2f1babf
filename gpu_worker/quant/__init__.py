"""Checkpoints whose weights are quantized: what their config.json says, their formats, and making them."""
