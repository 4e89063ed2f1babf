"""Dying with the parent, where that one has died before it could be asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a call of Linux")
@pytest.mark.parametrize(("parent", "exit_code"), [("os.getppid()", 0), ("os.getpid()", 1), ("None", 0)])
def test_a_parent_that_is_gone_is_noticed(parent: str, exit_code: int) -> None:
    """A process whose parent is no longer the one it was started by should end at once."""
    code = f"import os; from shared.process import die_with_parent; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == exit_code
