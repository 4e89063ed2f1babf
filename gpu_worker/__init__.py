"""The worker: paged attention and continuous batching; pushes tokens back through the bus."""
