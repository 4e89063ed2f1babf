"""What names an adapter's content: two of one name are different adapters when their files differ."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, shorten
from shared.paths import expand

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PIECE_BYTES = 1 << 20
_FORM = '{"name": NAME, "path": FOLDER, "base_model_name": MODEL}'


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """An adapter that is served from the start. `model`: a name of the model that it is for; "": the only one."""

    name: str
    folder: Path
    model: str = ""


def parse_lora_modules(texts: tuple[str, ...]) -> tuple[LoraModule, ...]:
    """The adapters of `--lora-modules`, each NAME=FOLDER or, as in vLLM, a JSON object.

    Raises:
        ConfigError: an entry is neither, or a name comes twice.
    """
    modules = tuple(_parse_module(text) for text in texts)
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules: the name {shorten(name)} comes twice; give each adapter its own")
    return modules


def _parse_module(text: str) -> LoraModule:
    if text.startswith("{"):
        return _parse_object(text)
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise ConfigError(f"--lora-modules={shorten(text)}: must be NAME=FOLDER, or {_FORM}")
    return LoraModule(name=name, folder=expand("--lora-modules", folder))


def _parse_object(text: str) -> LoraModule:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--lora-modules={shorten(text)}: is not JSON: {shorten(error)}") from None
    known, needed = {"name", "path", "base_model_name"}, {"name", "path"}
    if not needed <= fields.keys() <= known or not all(isinstance(value, str) and value for value in fields.values()):
        raise ConfigError(f"--lora-modules={shorten(text)}: must be NAME=FOLDER, or {_FORM}")
    folder = expand("--lora-modules", fields["path"])
    return LoraModule(name=fields["name"], folder=folder, model=fields.get("base_model_name", ""))


def content_hash(folder: Path) -> str:
    """32 hex digits of an adapter's two files.

    Raises:
        ConfigError: one of them is missing or cannot be read.
    """
    digest = hashlib.sha256(b"quire-adapter-1\n")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{shorten(path)}: must be a regular file")
            digest.update(f"{name} {status.st_size}\n".encode())
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
