"""The launcher's temporary folder: gone with its launcher, however that ends, and nobody else's is touched."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.private_folder import LOCK_NAME, private_folder

HOLD = """
import sys, tempfile
from quire.private_folder import private_folder
tempfile.tempdir = sys.argv[1]
with private_folder(print) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(temporary)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_launcher(temporary: Path) -> None:
    """Inside it should be there, empty but for the lock and for this user only; afterwards nothing should be left."""
    with private_folder(print) as folder:
        assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_what_a_killed_launcher_left_goes_with_the_next(temporary: Path) -> None:
    """kill -9 should leave a folder, and the next launcher remove it and say so; a living one's should stay."""
    killed, left = start_holder(temporary)
    living, kept = start_holder(temporary)
    with killed, living:
        killed.kill()
        killed.wait()
        (left / "data").mkdir()
        (left / "data" / "file").write_text("x")
        told: list[str] = []
        with private_folder(told.append) as mine:
            assert set(temporary.iterdir()) == {kept, mine}
        assert [str(left) in line for line in told] == [True]
        living.communicate("")
    assert list(temporary.iterdir()) == []


def test_what_looks_alike_is_left_alone(temporary: Path) -> None:
    """A folder without the lock, a file, and a link to a folder with it should stay, whatever their names."""
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_NAME).touch()
    (temporary / "quire-folder").mkdir()
    (temporary / "quire-file").touch()
    (temporary / "quire-link").symlink_to(elsewhere)
    before = set(temporary.rglob("*"))
    with private_folder(print):
        pass
    assert set(temporary.rglob("*")) == before
