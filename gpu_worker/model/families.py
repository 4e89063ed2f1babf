"""The models that are supported: which architecture's config is read by which file, and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.config_reader import ConfigReader, open_config
from gpu_worker.model.gemma2 import read_gemma2
from gpu_worker.model.gemma3 import read_gemma3
from gpu_worker.model.llama import read_llama
from gpu_worker.model.mistral import read_mistral
from gpu_worker.model.mixtral import read_mixtral
from gpu_worker.model.phi3 import read_phi3
from gpu_worker.model.qwen2 import read_qwen2
from gpu_worker.model.qwen3 import read_qwen3
from gpu_worker.model.qwen3_moe import read_qwen3_moe
from gpu_worker.model.transformers_config import WHITELIST, read_transformers, refuse_architecture
from shared.errors import ConfigError

FAMILIES: dict[str, Callable[[ConfigReader], CheckpointConfig]] = {
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "Phi3ForCausalLM": read_phi3,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
}


def read_config(folder: Path, implementation: str = "auto") -> CheckpointConfig:
    """The config of the checkpoint in `folder`.

    Args:
        implementation: what `--model-impl` says.

    Raises:
        ConfigError: no config.json, a bad or missing value, or something this version does not support.
    """
    reader = open_config(folder)
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.fail("architectures", "must name one architecture")
    name = names[0]
    if name in FAMILIES and implementation != "transformers":
        return FAMILIES[name](reader)
    if name not in WHITELIST:
        refuse_architecture(reader, name, tuple(FAMILIES))
    if implementation == "quire":
        raise ConfigError(f"--model-impl=quire: there is no family file for {name}; use auto or transformers")
    return read_transformers(reader, name)
