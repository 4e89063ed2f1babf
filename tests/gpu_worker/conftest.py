"""Tiny models, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.random_model import write_random_model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `test` model."""
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test")


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `test_qwen2` model."""
    return write_random_model("test_qwen2", tmp_path_factory.mktemp("models") / "test_qwen2")
