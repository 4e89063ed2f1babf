"""Qwen2: Llama's decoder with a bias on queries, keys and values (`CheckpointConfig.has_qkv_bias`),
some of whose layers may see a window only (`CheckpointConfig.windows`)."""

from __future__ import annotations

from gpu_worker.model.llama import load_llama

load_qwen2 = load_llama
