"""Settings of adapters, and what names their content."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import config
from shared.adapters import LoraModule, content_hash, parse_lora_modules
from shared.config import ServeConfig
from shared.errors import ConfigError

UPDATES = ["--enable-lora-updates", "--lora-dir=/adapters"]


def test_modules_are_named_folders() -> None:
    """Each entry should be a name and a folder, which may hold an equals sign."""
    texts = ("a=/x", "b=/y=z", '{"name": "c", "path": "/z", "base_model_name": "big"}', '{"name": "d", "path": "/w"}')
    assert parse_lora_modules(texts) == (
        LoraModule(name="a", folder=Path("/x")),
        LoraModule(name="b", folder=Path("/y=z")),
        LoraModule(name="c", folder=Path("/z"), model="big"),
        LoraModule(name="d", folder=Path("/w")),
    )


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--enable-lora", "--lora-modules", "sql"], "--lora-modules=sql: must be NAME=FOLDER"),
        (["--enable-lora", "--lora-modules", "=x"], "must be NAME=FOLDER"),
        (["--enable-lora", "--lora-modules", '{"name": "a"'], "is not JSON"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": 3}'], 'must be NAME=FOLDER, or {"name": NAME'),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "x", "rank": "3"}'], "must be NAME=FOLDER, or"),
        (["--enable-lora", "--lora-modules", "a=x", "a=y"], "--lora-modules: the name a comes twice"),
        (["--lora-modules", "a=x"], "--lora-modules=a=x: needs --enable-lora"),
        (["--max-loras=0"], "--max-loras='0': must be"),
        (UPDATES, "--enable-lora-updates: set --admin-key"),
        ([*UPDATES, "--admin-key=k", "--api-key", "k"], "--admin-key: is one of --api-key"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(argv: list[str], text: str) -> None:
    """The error should name the flag and what to do."""
    with pytest.raises(ConfigError) as caught:
        config.load(ServeConfig, argv, program="test")
    assert text in str(caught.value)


def test_content_is_both_files(tmp_path: Path) -> None:
    """Another byte in either file, or a byte moved from one to the other, should be another content."""
    contents = set()
    for settings, weights in (("{}", "w"), ("{ }", "w"), ("{}", "v"), ("{}w", "")):
        (tmp_path / "adapter_config.json").write_text(settings)
        (tmp_path / "adapter_model.safetensors").write_text(weights)
        contents.add(content_hash(tmp_path))
    assert len(contents) == 4
    assert {len(content) for content in contents} == {32}
