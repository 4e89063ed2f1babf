"""Tests; the same tree as the code."""
