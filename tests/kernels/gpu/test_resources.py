"""Ahead-of-time code for sm_80 and sm_90: it compiles, fits, and keeps everything in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.autotune import NUM_STAGES

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes of one program
RESOURCES = Path(__file__).parent / "resources.py"
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_no_kernel_spills(capability: int, tmp_path: Path) -> None:
    """Every kernel should compile for each card, without a byte of spilled registers, within shared memory, and
    attention should load its next keys while it works. In a process of its own: this one may have imported triton as
    an interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(RESOURCES), "--sm", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    spilled = [report for report in reports if report["spill_bytes"] or report["stack_bytes"]]
    assert spilled == []
    for report in reports:
        assert 0 < report["registers"] <= 255, report
        assert report["shared_bytes"] <= SHARED_LIMIT[capability], report
        if report.get("num_stages") == NUM_STAGES:
            assert report["buffers"] >= 2, report
    assert {report["sm"] for report in reports} == {capability}
    names = {report["name"].split()[0] for report in reports}
    assert {"attention", "combination", "norm", "add", "silu·mul", "rotary", "kv", "block", "draw"} <= names
    assert {"int4", "fp8", "sum", "adapter", "experts"} <= names


def test_ops_need_no_triton() -> None:
    """All ops should import and run on CPU tensors where triton is not installed, without trying to import it."""
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py") if path.stem != "__init__")
    program = f"""
import sys
sys.modules["triton"] = None
import importlib, torch
for name in {names}:
    importlib.import_module("kernels." + name)
from kernels.kv_copy import kv_copy
from kernels.rms_norm import rms_norm
from kernels.sampling import greedy
x = torch.eye(4)
assert rms_norm(x, torch.ones(4), 0.0).shape == x.shape
assert greedy(x).tolist() == [0, 1, 2, 3]
kv_copy(x, x, torch.tensor([1]), torch.tensor([2]))
assert x[2].tolist() == [0.0, 1.0, 0.0, 0.0]
assert not any(name.startswith("kernels.gpu") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
