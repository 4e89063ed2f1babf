"""Which model folder to serve: none given, a folder, or a name that only a hub could resolve."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from shared import config as settings
from shared.config import ServeConfig
from shared.errors import ConfigError, shorten
from shared.paths import cache_folder, expand


def resolve(model: str, cache_dir: Path, say: Callable[[str], None], *, needs_tokenizer: bool = True) -> Path:
    """The absolute folder of the checkpoint that `model` names.

    Args:
        model: a folder; empty means SmolLM2-135M-Instruct, made in `cache_dir` if it is not there yet.
        say: takes progress lines.
        needs_tokenizer: there must be one in the folder.

    Raises:
        ConfigError: there is no such folder, or it is no checkpoint.
    """
    if not model:
        from quire.smollm2 import ensure_smollm2

        return ensure_smollm2(cache_dir, report=say).resolve()
    folder = expand("--model", model)
    if folder.is_dir():
        _check(folder, ("config.json", "tokenizer.json") if needs_tokenizer else ("config.json",))
        return folder.resolve()
    if folder.exists():
        raise ConfigError(
            f"--model={shorten(model)}: is a file; give the folder that holds config.json and *.safetensors"
        )
    if _looks_like_hub_id(model):
        raise ConfigError(
            f"--model={shorten(model)}: there is no such folder, and models are not fetched from a hub; "
            "download the checkpoint and give its folder"
        )
    raise ConfigError(f"--model={shorten(model)}: there is no such folder")


def _check(folder: Path, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"--model={shorten(folder)}: not a checkpoint, it lacks {', '.join(missing)}")


def _looks_like_hub_id(model: str) -> bool:
    """`name` or `organization/name`, and nothing that only a path would have."""
    return model.count("/") <= 1 and not model.startswith(("/", ".", "~"))


def main(argv: list[str]) -> int:
    """`python -m quire.checkpoint [MODEL] [options of serve]`: prepare a model to be served. Raises `ConfigError`."""
    config = settings.load(ServeConfig, argv, program="python -m quire.checkpoint", description="Prepare a model.")
    folder = resolve(
        config.model.model,
        cache_folder(config.engine.cache_dir),
        lambda line: print(f"quire: {line}", flush=True),
        needs_tokenizer=not config.model.tokenizer,
    )
    print(f"quire: the model is in {folder}")
    return 0


if __name__ == "__main__":
    from quire.cli import run_command

    sys.exit(run_command(main, sys.argv[1:]))
