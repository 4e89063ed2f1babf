"""Which models a launcher serves, and what its gateways are told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.models import for_gateways, resolve_models
from shared import flags
from shared.config import ModelConfig, ServeConfig
from shared.errors import ConfigError
from tests.gateway.tiny_model import make_model_folder


def make_checkpoint(folder: Path) -> Path:
    make_model_folder(folder)
    (folder / "model.safetensors").touch()
    return folder


def resolve(*argv: str) -> list[ModelConfig]:
    config = flags.parse(ServeConfig, argv, {}, program="test")
    return resolve_models(config, Path("/nowhere"), lambda line: None)


def test_models_are_named_by_folder_or_by_the_user(tmp_path: Path) -> None:
    """FOLDER should be served under its own name, NAME=FOLDER under that; other settings are each one's."""
    a, b = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b=c")
    first, second, third = resolve(str(a), str(b), f"x={a}", "--max-model-len=99")
    assert [model.served_model_name for model in (first, second, third)] == [("a",), ("b=c",), ("x",)]
    assert [model.model for model in (first, second, third)] == [str(a), str(b), str(a)]
    assert {model.max_model_len for model in (first, second, third)} == {99}
    told = for_gateways([first, second, third])
    assert told == ModelConfig(served_model_name=("a", "b=c", "x"), max_model_len=99)


def test_a_single_model_is_told_to_gateways_as_it_is(tmp_path: Path) -> None:
    """One model should keep its folder, for gateways that work before any worker is there, and all of its names."""
    a = make_checkpoint(tmp_path / "a")
    (model,) = resolve(f"--model={a}", "--served-model-name", "x", "y")
    assert model == ModelConfig(model=str(a), served_model_name=("x", "y"))
    assert for_gateways([model]) == model
    assert resolve(f"x={a}") == [replace(model, served_model_name=("x",))]
    with pytest.raises(ConfigError, match="leave one of them out"):
        resolve(f"x={a}", "--served-model-name=y")


def test_adapters_go_to_the_model_that_they_name(tmp_path: Path) -> None:
    """Each worker should be told of its own model's adapters; one that names no model be refused."""
    a, b = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b")
    texts = [
        '{"name": "x", "path": "/x", "base_model_name": "b"}',
        '{"name": "y", "path": "/y", "base_model_name": "a"}',
    ]
    first, second = resolve(str(a), "--more-models", str(b), "--enable-lora", "--lora-modules", *texts)
    assert (first.lora_modules, second.lora_modules) == ((texts[1],), (texts[0],))
    with pytest.raises(ConfigError, match="give it as JSON, with one of a, b as base_model_name"):
        resolve(str(a), "--more-models", str(b), "--enable-lora", "--lora-modules", "x=/x")


@pytest.mark.parametrize(("arguments", "message"), [
    (("--served-model-name=y",), "name each, as NAME=FOLDER"), (("--autoscale=1:2",), "is for one model"),
    (("--workers=40",), "that makes 80, at most 64"), ((), "two models are called a")])  # fmt: skip
def test_what_is_for_one_model_is_refused_for_several(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Names, scaling and a number of workers that do not go with several models should be refused in a line."""
    a = make_checkpoint(tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        resolve(str(a), str(a), *arguments)
