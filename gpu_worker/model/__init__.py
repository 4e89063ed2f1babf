"""Models over the paged KV cache, their loading and the buffers of a step."""
