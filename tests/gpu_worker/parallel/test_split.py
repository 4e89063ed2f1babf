"""Which part of a model each rank has, and what cannot be split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.families import read_config
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.split import Split, check_ranks, check_split
from gpu_worker.model.weights import Projection, read_layer
from shared.config import EngineConfig
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model
from tests.gpu_worker.quant.checkpoints import FORMS, write_quantized


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Phi-3, which holds queries, keys and values as one tensor, gate and up as another."""
    return write_tiny_model(FAMILIES["phi3"], tmp_path_factory.mktemp("models") / "phi3")


@pytest.fixture(scope="module")
def config(folder: Path) -> CheckpointConfig:
    return read_config(folder)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "4 attention heads, which do not divide among 3 ranks; sizes that fit: 1, 2, 4"),
        (8, {}, "4 attention heads, which do not divide among 8 ranks; sizes that fit: 1, 2, 4"),
        (2, {"num_heads": 6, "num_kv_heads": 3}, "3 key heads, which neither divide among 2 ranks nor divide them; "
                                                 "sizes that fit: 1, 3, 6"),
        (4, {"intermediate_size": 98}, "feed-forward layers of 98, which do not divide by 4; sizes that fit: 1, 2"),
        (4, {"vocab_size": 3}, "3 token ids, too few for 4 ranks; sizes that fit: 1, 2"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused(
    size: int, changes: dict[str, Any], message: str, config: CheckpointConfig
) -> None:
    """The error should name the setting, what of the model does not divide, and what would."""
    with pytest.raises(ConfigError) as refused:
        check_split(replace(config, **changes), size)
    assert str(refused.value) == f"--tensor-parallel-size={size}: Phi3ForCausalLM has {message}"


@pytest.mark.parametrize(("name", "what"), [("mixtral", "feed-forward layers of 98"),
                                            ("qwen3_moe", "feed-forward layers of 50 and 96")])  # fmt: skip
def test_experts_are_divided_too(name: str, what: str, tmp_path: Path) -> None:
    """Inner sizes of experts, and of dense layers beside them, should both have to divide."""
    key = "intermediate_size" if name == "mixtral" else "moe_intermediate_size"
    config = read_config(write_tiny_model(FAMILIES[name] | {key: 98 if name == "mixtral" else 50}, tmp_path / name))
    check_split(config, 2)
    with pytest.raises(ConfigError, match=f"{what}, which do not divide by 4"):
        check_split(config, 4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("awq", {}, "the checkpoint is quantized (awq, int4), which only one rank computes; leave the flag out"),
        ("phi3", {"enable_lora": True}, "adapters (--enable-lora) are for one rank only; leave one of the two flags "
                                        "out"),
        ("foreign", {}, "transformers computes Phi3ForCausalLM (--model-impl), in one rank only; leave the flag out"),
    ],
)  # fmt: skip
def test_what_one_rank_computes_is_refused(
    name: str, settings: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    """The error should name the setting and what it does not go with; one rank should do."""
    if name == "awq":
        folder = write_quantized(FORMS["awq 32"], tmp_path)
    found = read_config(folder, "transformers" if name == "foreign" else "auto")
    with pytest.raises(ConfigError) as refused:
        check_ranks(found, EngineConfig(tensor_parallel_size=2, **settings))
    assert str(refused.value).startswith(f"--tensor-parallel-size=2: {message}")
    check_ranks(replace(found, scheme=None, is_foreign=False), EngineConfig(tensor_parallel_size=2))


def _read(folder: Path, config: CheckpointConfig, split: Split) -> dict[str, Projection]:
    checkpoint = Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu"))
    layer = read_layer(config, checkpoint, 1, split)
    (mlp,) = layer.mlp
    return {"qkv": layer.qkv, "output": layer.output, "gate": mlp.gate, "up": mlp.up, "down": mlp.down}


@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_up_the_whole(size: int, folder: Path, config: CheckpointConfig) -> None:
    """Rows of projections in, and columns of projections out, should come once each, but for keys and values that
    several ranks have."""
    whole = _read(folder, config, Split())
    parts = [_read(folder, config, Split(rank, size)) for rank in range(size)]
    for name in ("gate", "up"):
        assert torch.equal(torch.cat([part[name].weight for part in parts]), whole[name].weight)
    for name in ("output", "down"):
        assert torch.equal(torch.cat([part[name].weight for part in parts], dim=1), whole[name].weight)
    heads = whole["qkv"].weight.view(-1, config.head_size, config.hidden_size)
    own = 4 // size
    for rank, part in enumerate(parts):
        kv = rank * 2 // size
        rows = [*range(rank * own, (rank + 1) * own), 4 + kv, 6 + kv]
        assert torch.equal(part["qkv"].weight.view(own + 2, config.head_size, -1), heads[rows])


def test_other_commands_refuse_ranks(llama_folder: Path) -> None:
    """What computes in one process should say so."""
    with pytest.raises(ConfigError, match="--tensor-parallel-size=2: only workers have several ranks"):
        make_runner(llama_folder, tensor_parallel_size=2)
