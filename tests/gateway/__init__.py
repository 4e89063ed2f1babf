"""Tests of the gateway alone: a real port, a bus, a scripted worker."""
