"""`quire quantize`: its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from quire.bench.random_model import write_random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_makes_a_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folder, flags and the new folder in the order that people type them should give a checkpoint, and its size."""
    text = tmp_path / "text"
    text.write_text("Some words to choose scales by, over and over again. " * 40)
    out = tmp_path / "out"
    flags = ["--method", "awq", "--calib", str(text), "--group-size", "32"]
    assert cli.main(["quantize", str(folder), *flags, str(out)]) == 0
    shown = capsys.readouterr()
    assert f"{out}: " in shown.out
    assert "quantize: layer" in shown.err
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out: is missing"),
        (["out"], "--calib: awq needs a file with text"),
        (["out", "--calib", "nowhere"], "--calib=nowhere: "),
        (["full", "--method", "int8"], "--out=full: is there already"),
        (["out", "--method", "int4", "--group-size", "0"], "--group-size=0: must be at least 1"),
        (["out", "--method", "int4", "--group-size", "24"], "--group-size=24: does not divide"),
        (["out", "--method", "gptq"], "--method='gptq'"),
    ],
)
def test_what_is_wrong_is_named(
    flags: list[str], message: str, folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong setting should be one line with its value."""
    (here / "full").mkdir()
    (here / "full" / "file").write_text("")
    assert cli.main(["quantize", str(folder), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()
