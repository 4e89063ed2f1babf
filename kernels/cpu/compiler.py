"""Runs a compiler that ends with this process, kill -9 included, and so do the processes that it starts.

Design note. A compiler is a driver that starts others (cc1, as, ld), which work on for seconds when only the driver
dies. The kernel's `PR_SET_PDEATHSIG` reaches no grandchild (a fork clears it) and follows the thread that forked;
setting it in the child would run Python between fork and exec, beside whatever threads there are. So the compiler gets
a process group of its own, with a shell in it that reads from a pipe whose other end only this process holds. However
this process ends, the kernel closes that end: the shell ends the group, first with a signal on which compilers remove
their temporary files.
"""

from __future__ import annotations

import os
import subprocess

_GUARD = """
unset LD_PRELOAD  # what is to watch this process would only slow a compiler down
exec 3<&0 </dev/null
{ trap '' TERM; read -r nothing <&3; kill -TERM 0; sleep 1; kill -KILL 0; } >/dev/null 2>&1 &
is_over=
trap 'is_over=1' TERM
"$@" 3<&-
status=$?
[ -z "$is_over" ] || kill -KILL 0
kill -KILL $!
exit $status
"""
"""For `sh`: run the arguments, and end the process group when standard input ends: with SIGTERM, and what is left of it
when the compiler has gone, or a second later, with SIGKILL. Both shells are there until then."""


def run_compiler(command: list[str], *, timeout_s: float) -> tuple[int, str]:
    """Exit status and standard error of `command`. When this raises, all that it had started is killed.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
        OSError: there is no shell.
    """
    lifeline, held = os.pipe()  # no other child inherits them
    with open(held, "wb") as held_end:
        with open(lifeline, "rb") as guards_end:
            process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *command],
                stdin=guards_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
        with process, held_end:  # our end is closed before the process is waited for
            errors = process.communicate(timeout=timeout_s)[1]
    return process.returncode, errors
