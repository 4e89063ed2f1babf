"""Phi-3 and Phi-4-mini: Llama's decoder whose checkpoint holds queries, keys and values as one tensor, gate and up as
another. All layers may see a window; Phi-4-mini turns a part of each head only; long contexts are of the kind longrope,
which older checkpoints call su or yarn."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import CheckpointConfig, read_decoder, read_window, same_windows
from gpu_worker.model.config_reader import ConfigReader

DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
"""What transformers takes where config.json says nothing."""


def read_phi3(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Phi3ForCausalLM."""
    reader = _rename_rope(reader.over(DEFAULTS))
    config = read_decoder(reader, is_turned_whole=False)
    return replace(config, is_fused=True, windows=same_windows(reader, read_window(reader), config.num_layers))


def _rename_rope(reader: ConfigReader) -> ConfigReader:
    """`reader` with today's name of the one kind of rotary embedding that these models have beside the plain one."""
    nested = reader.nested("rope_parameters", "rope_scaling")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind not in ("default", "longrope", "su", "yarn"):
        key = "rope_type" if "rope_type" in nested.raw else "type"
        nested.fail(key, "only default and longrope are supported for this architecture")
    if kind == "default":
        return reader
    return ConfigReader(reader.path, {**reader.raw, "rope_parameters": {**nested.raw, "rope_type": "longrope"}})
