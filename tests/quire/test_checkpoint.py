"""Which folder a model name means, and what is said when it means none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import checkpoint
from shared import paths
from shared.errors import ConfigError


def make_checkpoint(folder: Path, *, without: str = "") -> Path:
    folder.mkdir()
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {without}:
        (folder / name).touch()
    return folder


def resolve(model: str, cache: Path) -> Path:
    return checkpoint.resolve(model, cache, lambda line: None)


def test_checkpoint_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with all files should be taken, as an absolute path."""
    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert resolve("m", tmp_path) == folder.resolve()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    """A folder that lacks a file should be refused by the file's name."""
    folder = make_checkpoint(tmp_path / "m", without=missing)
    with pytest.raises(ConfigError, match=missing.removeprefix("model")):
        resolve(str(folder), tmp_path)


def test_another_tokenizer_makes_up_for_a_missing_one(tmp_path: Path) -> None:
    """With `--tokenizer` the model's folder need not have one."""
    folder = make_checkpoint(tmp_path / "m", without="tokenizer.json")
    assert checkpoint.resolve(str(folder), tmp_path, print, needs_tokenizer=False) == folder.resolve()


@pytest.mark.parametrize("model", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_hub_name_is_refused_with_the_remedy(tmp_path: Path, model: str) -> None:
    """A hub's name should be refused, saying that nothing is fetched and a folder is needed."""
    with pytest.raises(ConfigError, match="not fetched from a hub"):
        resolve(model, tmp_path)


@pytest.mark.parametrize("model", ["/no/such", "./nothing", "a/b/c"])
def test_missing_folder_is_named(tmp_path: Path, model: str) -> None:
    """A path that leads nowhere should be refused as one."""
    with pytest.raises(ConfigError, match="no such folder") as caught:
        resolve(model, tmp_path)
    assert "hub" not in str(caught.value)


def test_file_is_refused(tmp_path: Path) -> None:
    """A file in place of a folder should be refused, saying what is wanted."""
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve(str(path), tmp_path)


@pytest.mark.parametrize("call", [
    lambda: checkpoint.resolve("~nosuchuser/model", Path(), print),
    lambda: paths.cache_folder("~nosuchuser/cache"),
    lambda: paths.expand("--data-dir", "~nosuchuser/data")])  # fmt: skip
def test_an_unknown_user_is_told(call: Callable[[], object]) -> None:
    """~nosuchuser should be refused with the flag and the remedy."""
    with pytest.raises(ConfigError, match=r"--\w+(-dir)?=~nosuchuser/\w+: there is no such user; write"):
        call()
