"""Mistral: Llama's decoder, whose layers may see a window of the context only (`CheckpointConfig.windows`)."""

from __future__ import annotations

from gpu_worker.model.llama import load_llama

load_mistral = load_llama
