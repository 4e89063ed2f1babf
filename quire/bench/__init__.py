"""Measuring: workloads with fixed seeds, a load generator for any OpenAI-style server, models with random weights."""
