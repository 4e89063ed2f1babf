"""Tests of the engine, on a scripted model."""
