"""Tests of the worker service, on a scripted model and the memory bus."""
