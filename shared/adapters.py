"""What names an adapter's content: two of one name are different adapters when their files differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ConfigError, shorten
from shared.paths import expand

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PIECE_BYTES = 1 << 20


def parse_lora_modules(texts: tuple[str, ...]) -> dict[str, Path]:
    """The folders of `--lora-modules` by name.

    Raises:
        ConfigError: an entry is not NAME=FOLDER, or a name comes twice.
    """
    modules: dict[str, Path] = {}
    for text in texts:
        name, separator, folder = text.partition("=")
        if not (name and separator and folder):
            raise ConfigError(f"--lora-modules={shorten(text)}: must be NAME=FOLDER")
        if name in modules:
            raise ConfigError(f"--lora-modules={shorten(text)}: the name comes twice; give each adapter its own")
        modules[name] = expand("--lora-modules", folder)
    return modules


def content_hash(folder: Path) -> str:
    """32 hex digits of an adapter's two files.

    Raises:
        ConfigError: one of them is missing or cannot be read.
    """
    digest = hashlib.sha256(b"quire-adapter-1\n")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            digest.update(f"{name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        except OSError as error:
            hint = _hint(folder) if name == WEIGHTS_FILE else ""
            raise ConfigError(f"{shorten(path)}: {error.strerror}; an adapter is a folder with {CONFIG_FILE} and "
                              f"{WEIGHTS_FILE}{hint}") from None  # fmt: skip
    return digest.hexdigest()[:32]


def _hint(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("adapter_model.*") if path.suffix in (".bin", ".pt", ".pth"))
    return f" (found {', '.join(others)}: convert it to safetensors)" if others else ""
