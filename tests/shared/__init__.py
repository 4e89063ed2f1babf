"""Tests of shared/."""
