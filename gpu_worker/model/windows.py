"""Which layers of a model see a window only, and what follows for the blocks of its KV cache.

A sequence's blocks that lie before its window can be freed only when no layer reads them. All layers share one block
table so far (`KvLayout.groups`), so that needs a window in every layer; with some full layers the others compute less,
and nothing is freed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import CheckpointConfig
from shared.logs import get_log

_log = get_log("windows")


def without_idle_windows(config: CheckpointConfig, model_len: int) -> CheckpointConfig:
    """`config` without the windows that hide nothing from a sequence of up to `model_len` tokens. Logs what the others
    are good for."""
    windows = tuple(None if window is None or window >= model_len else window for window in config.windows)
    chosen = replace(config, windows=windows)
    if any(windows):
        shared = shared_window(chosen)
        _log.info(
            "window.found", tokens=next(filter(None, windows)), layers=sum(map(bool, windows)), of=config.num_layers,
            frees="blocks before the window" if shared else "nothing: other layers see the whole context",
        )  # fmt: skip
    return chosen


def shared_window(config: CheckpointConfig) -> int | None:
    """The tokens that a query sees in any layer, itself among them; None when some layer sees all."""
    if None in config.windows:
        return None
    return max(window for window in config.windows if window is not None)
