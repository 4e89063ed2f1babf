"""The container images hold what their services import; checked from the sources, so that no engine is needed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"shared", "kernels", "gateway", "scheduler_svc", "gpu_worker", "quire", "autoscaler"}
NOT_IN_IMAGES = {"triton", "transformers"}
"""The first comes with CUDA builds of torch, the second is asked for by those who want `--model-impl transformers`."""


def imported(*places: str) -> set[str]:
    """Top names of the modules from outside that the files at `places` import."""
    names: set[str] = set()
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add(node.module or "")
    return {name.split(".")[0] for name in names} - OURS - set(sys.stdlib_module_names)


def required(name: str) -> set[str]:
    lines = (ROOT / "deploy" / f"requirements-{name}.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize(
    ("places", "lists"),
    [
        (("shared", "gateway", "scheduler_svc"), ("services",)),
        (("shared", "autoscaler"), ("services", "autoscaler")),
        (("shared", "kernels", "gpu_worker", "quire/checkpoint.py", "quire/smollm2.py"), ("services", "worker")),
    ],
    ids=["services", "autoscaler", "worker"],
)
def test_images_have_what_is_imported(places: tuple[str, ...], lists: tuple[str, ...]) -> None:
    """Each module that a service imports should be in the list that its image installs."""
    installed = set().union(*map(required, lists)) | ({"torch"} if "worker" in lists else set())
    assert imported(*places) - NOT_IN_IMAGES - installed == set()


def test_required_packages_are_pinned() -> None:
    """Each package of the images should have its version in constraints.txt, and torch the set-up's version."""
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert (required("services") | required("worker") | required("autoscaler")) - pinned == set()
    (torch,) = {line for line in (ROOT / "deploy/Dockerfile").read_text().splitlines() if line.startswith("ARG TORCH=")}
    assert f"DEFAULT_TORCH := {torch.removeprefix('ARG TORCH=')}" in (ROOT / "Makefile").read_text().splitlines()
