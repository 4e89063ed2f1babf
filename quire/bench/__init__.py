"""Measuring: workloads against a running server, and models with random weights to measure with."""
