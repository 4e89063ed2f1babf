"""Tests of gpu_worker/lora."""
