"""`quire quantize`: a checkpoint with quantized weights from one of floats, for us and for others to load."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gpu_worker.quant.making import METHODS, Recipe, make_checkpoint
from quire import checkpoint
from shared import config
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.paths import cache_folder, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    model: str = setting("", "folder of the float checkpoint", is_positional=True)
    out: str = setting("", "folder to write; must not be there, or be empty", is_positional=True)
    method: str = setting("awq", "awq: 4 bits with scales chosen from a text (AutoAWQ's format); int4, int8: plain "
                          "rounding (compressed-tensors)", choices=METHODS)  # fmt: skip
    calib: str = setting("", "file with the text that awq chooses by, some thousand words of what the model will see")
    calib_tokens: int = setting(8192, "most tokens of it", minimum=64)
    calib_window: int = setting(512, "tokens of it that are read together", minimum=16)
    group_size: int = setting(128, "weights that share a scale, of awq and int4; -1: a layer's whole width", minimum=-1)


def main(argv: list[str]) -> int:
    """Run the command. Raises `ConfigError`."""
    settings = config.load(QuantizeConfig, argv, program="quire quantize", description=__doc__ or "")
    for name in ("model", "out"):
        if not getattr(settings, name):
            raise ConfigError(f"--{name}: is missing; quire quantize MODEL --method awq --calib FILE OUT")
    if settings.group_size == 0:
        raise ConfigError("--group-size=0: must be at least 1, or -1 for a layer's whole width")
    folder, out = checkpoint.resolve(settings.model, cache_folder(""), _say), expand("--out", settings.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={shorten(settings.out)}: is there already; name a folder that is not")
    windows = _read_windows(folder, settings) if settings.method == "awq" else []
    since = time.monotonic()
    recipe = Recipe(method=settings.method, group=settings.group_size)
    num_bytes = make_checkpoint(folder, out, recipe, windows, _say)
    print(f"{out}: {num_bytes / 2**20:.1f} MiB, {time.monotonic() - since:.0f} s")
    return 0


def _read_windows(folder: Path, settings: QuantizeConfig) -> list[list[int]]:
    """The calibration's token ids."""
    shown = f"--calib={shorten(settings.calib)}"
    if not settings.calib:
        raise ConfigError("--calib: awq needs a file with text to choose scales by; int4 and int8 do not")
    try:
        text = expand("--calib", settings.calib).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}: {error}") from None
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: settings.calib_tokens]
    window = settings.calib_window
    windows = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    windows = [part for part in windows if len(part) > 1]
    if len(tokens) < 64:
        raise ConfigError(f"{shown}: has {len(tokens)} tokens; at least 64 are needed, some thousand are good")
    _say(f"calibrating with {len(tokens)} tokens in windows of {window}")
    return windows


def _say(line: str) -> None:
    print(f"quantize: {line}", file=sys.stderr, flush=True)
