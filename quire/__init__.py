"""Quire: serve large language models with paged attention, continuous batching and durable token streams."""

__version__ = "0.1.0"
