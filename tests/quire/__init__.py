"""Tests of quire/."""
