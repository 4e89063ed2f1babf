"""Tests of the autoscaler."""
