"""Services of one Python object: the launcher as a child process, which starts all others and a private Redis.

Design note. The launcher asks the kernel to be killed when its parent ends, and its children ask the same, so a
`kill -9` of Python leaves nothing that runs. The kernel ties this to the *thread* that forked: so the launcher is
started by a thread of its own, which does nothing but wait for it, and is there until it has ended. The gateway listens
on a free port of the loopback and wants a key that only this process knows: no other user of the machine comes in.

What the services write goes to a file in a private folder. While they start it is read along: warnings go to the logger
`quire`, and what a service refuses to start with becomes the exception's text.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from quire.api.arguments import in_callers_words, to_argv
from quire.private_folder import private_folder
from shared import flags
from shared.config import child_environment
from shared.errors import ArgumentError, DeploymentError

POLL_S = 0.02
STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
CONFIG_EXIT_CODE = 2
MAX_SHOWN_LINES = 20

_REFUSAL = re.compile(r"^[a-z_]+: error: (.*)", re.MULTILINE)
_DEFAULTS = {"log_level": "warning", "drain_s": 1, "request_timeout_s": 7 * 86_400}
"""Instead of a server's: there is one caller, who waits however long a batch takes and leaves nothing to drain."""

_ADAPTERS = {"enable_lora_updates": True, "lora_dir": ["/"]}

_logger = logging.getLogger("quire")


class PrivateCell:
    """`quire serve` for this process; ready when made.

    Args:
        arguments: of `LLM`, `model` among them.

    Raises:
        ArgumentError: the services refuse an argument.
        DeploymentError: they cannot be started for another reason.
    """

    patience_s = math.inf
    """Its launcher starts again what dies, and ends when that is of no use."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.api_key = secrets.token_hex(16)
        self.admin_key = secrets.token_hex(16) if arguments.get("enable_lora") else None
        """For loading adapters, from wherever they lie: the caller owns this process."""
        self._arguments = arguments
        self._owner = os.getpid()
        self._cleanup = contextlib.ExitStack()
        argv = to_argv(_DEFAULTS | (_ADAPTERS if self.admin_key else {}) | dict(arguments))
        self._folder = self._cleanup.enter_context(private_folder(_logger.info))
        self._process: subprocess.Popen[bytes] | None = None
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._problem: OSError | ValueError | None = None
        threading.Thread(target=self._keep, args=(argv,), name="quire-services", daemon=True).start()
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._has_started.wait()
            self.url = self._wait_ready()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raise `DeploymentError` when the services have ended."""
        if self._has_ended.is_set():
            raise DeploymentError(f"the services of this object have ended; make a new one{self._last_lines()}")

    def stop(self) -> None:
        """Stop everything; harmless when it has ended, and in a fork of the process that made it."""
        if os.getpid() != self._owner:
            return
        self._has_started.wait()
        if self._process is not None:
            for number, timeout_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGTERM, KILL_TIMEOUT_S)):
                if not self._has_ended.is_set():
                    self._process.send_signal(number)
                    self._has_ended.wait(timeout_s)
            if not self._has_ended.is_set():
                self._process.kill()
                self._has_ended.wait()
        self._cleanup.close()

    def _keep(self, argv: list[str]) -> None:
        """Start the launcher and stay until it has ended: it dies with this thread."""
        command = [sys.executable, "-P", "-m", "quire", "serve", "--host=127.0.0.1", "--port=0", "--die-with-parent"]
        command += [f"--parent-pid={os.getpid()}", f"--state-file={self._folder / 'state.json'}", *argv]
        try:
            with open(self._folder / "services.log", "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=child_environment(self._keys()),
                    process_group=0,
                )
        except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
            self._problem = error
        self._has_started.set()
        if self._process is not None:
            self._process.wait()
        self._has_ended.set()

    def _keys(self) -> dict[str, str]:
        admin = {} if self.admin_key is None else {flags.variable("admin_key"): self.admin_key}
        return {flags.variable("api_key"): self.api_key} | admin

    def _wait_ready(self) -> str:
        """Until a gateway can produce tokens; its address."""
        with open(self._folder / "services.log", "rb") as log:
            told: set[str] = set()
            while True:
                state = self._state()
                has_ended = self._has_ended.wait(0 if state.get("is_ready") else POLL_S)
                _tell_warnings(log, told)
                if has_ended:
                    raise self._why_not_started()
                if state.get("is_ready"):
                    return str(state["urls"][0])

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self._folder / "state.json").read_bytes())
        except FileNotFoundError:
            return {}
        return state

    def _why_not_started(self) -> Exception:
        if self._process is None:
            return DeploymentError(f"the services cannot be started: {self._problem}")
        refusal = _REFUSAL.search(self._log_text())
        if refusal is not None and self._process.returncode == CONFIG_EXIT_CODE:
            return ArgumentError(in_callers_words(refusal[1], self._arguments))
        return DeploymentError(f"the services could not start{self._last_lines()}")

    def _last_lines(self) -> str:
        lines = self._log_text().splitlines()[-MAX_SHOWN_LINES:]
        return "".join(["; their last lines:", *(f"\n  {line}" for line in lines)]) if lines else ""

    def _log_text(self) -> str:
        path = Path(self._folder, "services.log")
        return path.read_text(errors="replace") if path.exists() else ""


def _tell_warnings(log: IO[bytes], told: set[str]) -> None:
    """Pass on what is new in `log`, warnings once whichever worker has them."""
    for data in log.readlines():
        if not data.endswith(b"\n"):
            log.seek(-len(data), os.SEEK_CUR)  # the rest of it is being written
            return
        raw = data.decode(errors="replace").rstrip("\n")
        _, _, line = raw.partition(" WARNING ")
        if line and line not in told:
            told.add(line)
            _logger.warning(line)
        elif not line and raw.startswith("quire: "):
            _logger.info(raw.removeprefix("quire: "))
