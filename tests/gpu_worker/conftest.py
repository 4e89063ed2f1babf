"""Tiny models, made once a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.cpu.build import CpuKernelsUnavailable, best_isa, build, check_machine
from quire.bench.random_model import write_random_model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `test` model."""
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test")


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `test_qwen2` model."""
    return write_random_model("test_qwen2", tmp_path_factory.mktemp("models") / "test_qwen2")


@pytest.fixture(scope="session")
def cpu_kernels(kernels_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the compiled kernels; skips where there are none."""
    try:
        check_machine(best_isa())
        library = build(kernels_folder, best_isa()).path
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))
    return Path(shutil.copy(library, tmp_path_factory.mktemp("kernels"))).parent


@pytest.fixture
def cache_dir(cpu_kernels: Path, tmp_path: Path) -> str:
    """A cache folder of the test's own, with the compiled kernels."""
    return str(shutil.copytree(cpu_kernels, tmp_path / "cache"))
