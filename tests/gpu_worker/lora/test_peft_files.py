"""Reading adapters: what is taken, what is refused and how that is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.lora.adapter import AdapterStore
from gpu_worker.lora.peft_weights import Parts, read_peft
from gpu_worker.lora.targets import Key
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.families import read_config
from shared.adapters import content_hash
from shared.errors import ConfigError
from tests.gpu_worker.lora.peft_files import load_model, write_adapter
from tests.gpu_worker.model.tiny_families import FAMILIES, SIZES, write_tiny_model

MAX_RANK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and an adapter of it."""
    root = tmp_path_factory.mktemp("peft")
    model = write_tiny_model(SIZES | {"model_type": "llama"}, root / "model")
    return model, write_adapter(load_model(model), root / "adapter")


@pytest.fixture
def config(folders: tuple[Path, Path]) -> CheckpointConfig:
    return read_config(folders[0])


@pytest.fixture
def adapter(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(folders[1], tmp_path / "adapter")


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(path), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


QUERY_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def test_parts_of_fused_projections_lie_side_by_side(config: CheckpointConfig, adapter: Path) -> None:
    """Each part should have its own factors, B with the scale in it, and what has none should be left alone."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    change_tensors(adapter, dict.fromkeys((QUERY_A.replace("q_proj", "k_proj"),
                                           QUERY_A.replace("q_proj", "k_proj").replace("_A", "_B"))))  # fmt: skip
    query, key, value = read_peft(config, adapter, MAX_RANK)[1, "qkv"]
    assert key is None
    for part, name in ((query, QUERY_A), (value, QUERY_A.replace("q_proj", "v_proj"))):
        assert part is not None
        assert torch.equal(part[0], tensors[name])
        assert torch.equal(part[1], 2.0 * tensors[name.replace("_A", "_B")])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is not LORA"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"r": 0}, "r=0: must be a whole number"),
        ({"r": 17}, "rank 17 is above --max-lora-rank=16"),
        ({"rank_pattern": {"q_proj": 99}}, "rank 99 is above --max-lora-rank=16"),
        ({"rank_pattern": {"(": 3}}, "is no pattern"),
        ({"rank_pattern": {"([a-z0-9_.]+)+!": 4}}, "could take for ever"),
        ({"rank_pattern": {".*.*.*.*.*q_proj": 4}}, "could take for ever"),
        ({"lora_alpha": "much"}, "lora_alpha='much': must be a number"),
        ({"lora_alpha": 1e308}, r"lora_alpha=1e\+308: must be a number up to"),
        ({"lora_alpha": 10**400}, "lora_alpha=a number: must be a number up to"),
        ({"use_rslora": "yes"}, "use_rslora=yes: must be true or false"),
        ({"r": 5}, r"_proj.lora_A.weight is \[4, (\d+)\], the model and the adapter's config ask for \[5, \1\]"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_named(
    config: CheckpointConfig, adapter: Path, settings: dict[str, Any], text: str
) -> None:
    """A setting that would change what the adapter computes should be refused with its name and value."""
    change_config(adapter, **settings)
    with pytest.raises(ConfigError, match=text):
        read_peft(config, adapter, MAX_RANK)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "no place for base_model.model.lm_head.lora_A"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 320)}, "no place for .*embed_tokens"),
        ({QUERY_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(64)}, "no place for .*magnitude"),
        ({QUERY_A.replace("layers.1", "layers.3"): torch.ones(4, 64)}, "no place for .*layers.3"),
        ({QUERY_A: torch.ones(4, 63)}, r"is \[4, 63\], .* ask for \[4, 64\]"),
        ({QUERY_A: torch.full((4, 64), torch.nan)}, "no finite numbers"),
        ({QUERY_A: torch.ones(4, 64).to(torch.float8_e4m3fn)}, "holds torch.float8_e4m3fn that are no finite"),
        ({QUERY_A: torch.full((4, 64), 1e300, dtype=torch.float64)}, "no finite numbers"),
        ({QUERY_A.replace("layers.1", "layers." + "9" * 5000): torch.ones(4, 64)}, "no place for"),
        ({QUERY_A.replace("_A", "_A.default"): torch.ones(4, 64)}, "is there twice"),
        ({QUERY_A.replace("_A", "_B"): torch.full((64, 4), 3e38)}, "beyond float32"),
        ({QUERY_A: None}, "self_attn.q_proj has no lora_A"),
    ],
)
def test_tensors_without_a_place_are_named(
    config: CheckpointConfig, adapter: Path, changed: dict[str, torch.Tensor | None], text: str
) -> None:
    """What the model cannot take should be refused with the tensor's name and sizes."""
    change_tensors(adapter, changed)
    with pytest.raises(ConfigError, match=text):
        read_peft(config, adapter, MAX_RANK)


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    """An adapter of experts should be refused with that reason; one of attention is taken."""
    folder = write_tiny_model(FAMILIES["mixtral"], tmp_path / "model")
    adapter = write_adapter(load_model(folder), tmp_path / "adapter")
    config = read_config(folder)
    assert {name for _, name in read_peft(config, adapter, MAX_RANK)} == {"qkv", "output"}
    name = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
    change_tensors(adapter, {name: torch.ones(4, 64)})
    with pytest.raises(ConfigError, match="of experts not"):
        read_peft(config, adapter, MAX_RANK)


def test_missing_files_are_named(adapter: Path) -> None:
    """Without safetensors the error should say so, and what was found instead."""
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors.*found adapter_model.bin: convert it"):
        content_hash(adapter)


class Backend:
    """Keeps what it is given."""

    def prepare(self, factors: dict[Key, Parts]) -> object:
        return factors

    def put(self, slot: int, prepared: object) -> None:
        raise NotImplementedError


def test_the_store_knows_adapters_by_content(config: CheckpointConfig, adapter: Path, tmp_path: Path) -> None:
    """Equal files should be one adapter whatever their folder is called, changed ones another; the least recently used
    goes first, and who asks for content that is not there any more is told."""
    store = AdapterStore(2, lambda folder: read_peft(config, folder, MAX_RANK), Backend())
    first = store.load(adapter)
    assert store.load(shutil.copytree(adapter, tmp_path / "same")) is first
    others = []
    for alpha in (3, 4):
        folder = shutil.copytree(adapter, tmp_path / str(alpha))
        change_config(folder, lora_alpha=alpha)
        others.append(store.load(folder))
    assert len({first, *others}) == 3
    assert store.contents == tuple(other.content for other in others)
    assert store.find(others[0].content) is others[0]
    assert store.load(adapter, first.content) == first
    assert store.contents == (others[0].content, first.content)
    change_config(adapter, lora_alpha=7)
    with pytest.raises(ConfigError, match="have changed since"):
        store.load(adapter, others[1].content)
