"""A model's card: the files that say how its text becomes tokens and back, as they lie in its folder.

Workers publish the card of their model, so that gateways need no model folder. A card is named by a hash of what is in
it: equal names mean equal text, whoever made the card. It is packed with zlib at its fastest level: the
3.5 MB of SmolLM2 become 0.76 MB in 0.15 s (on a busy core of a Xeon with AMX; level 6: 0.64 MB in 0.46 s, lzma: 0.59
MB in 1.0 s), and are read back in 0.1 s. The hash takes 20 ms.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shared.errors import ConfigError, WireError
from shared.model_files import ModelFiles

REQUIRED_FILES = ("tokenizer.json", "config.json")
FILES = (*REQUIRED_FILES, "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
MAX_CARD_BYTES = 64 * 1024 * 1024
"""Of all files together; the largest tokenizers have about 35 MB."""
_FRAME_BYTES = 4096
"""More than the names in a packed card and what lies around the files."""
_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """`name` is the folder's, `files` are those of `FILES` that there are, `origin` is where they lie; None: with a
    worker. `has_defaults`: where a request is silent, generation_config.json says how to sample."""

    name: str
    files: Mapping[str, bytes]
    origin: ModelFiles | None = None
    has_defaults: bool = True

    def place(self, file: str) -> str:
        """What a file is called in an error."""
        return f"{file} in the card of {self.name}" if self.origin is None else str(self.origin.path(file))

    @property
    def card_id(self) -> str:
        """A hash of all but the origin."""
        digest = hashlib.sha256(b"%d" % self.has_defaults)
        for part in (self.name.encode(), *(part for name in FILES for part in (name.encode(), self.files.get(name)))):
            digest.update(b"-" if part is None else b"%d:" % len(part))
            digest.update(part or b"")
        return digest.hexdigest()[:32]


class _Packed(msgspec.Struct, tag_field="t", tag="card", forbid_unknown_fields=True):
    name: str
    files: dict[str, bytes]
    has_defaults: bool = True


def read_card(origin: ModelFiles) -> ModelCard:
    """The card of a model.

    Raises:
        ConfigError: a folder lacks what must be there, a file cannot be read, or they are too large together.
    """
    origin.check()
    paths = {name: origin.path(name) for name in FILES}
    try:
        files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror or error}") from None
    if (size := sum(map(len, files.values()))) > MAX_CARD_BYTES:
        shown = f"--model {origin.model}: {', '.join(files)}"
        raise ConfigError(f"{shown} have {size} bytes, at most {MAX_CARD_BYTES} are taken")
    name = origin.model.resolve().name
    return ModelCard(name=name, files=files, origin=origin, has_defaults=origin.has_defaults)


def pack_card(card: ModelCard) -> bytes:
    """`card` as workers publish it; takes a second for the largest ones."""
    return zlib.compress(msgspec.msgpack.encode(_Packed(card.name, dict(card.files), card.has_defaults)), _LEVEL)


def unpack_card(card_id: str, data: bytes) -> ModelCard:
    """The card `card_id`, packed in `data`. Raises `WireError` when it is not that."""
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(data, MAX_CARD_BYTES + _FRAME_BYTES)
        if not inflater.eof:
            raise WireError(f"a model card is cut off, or larger than {MAX_CARD_BYTES} bytes")
        packed = msgspec.msgpack.decode(plain, type=_Packed)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise WireError(f"not a model card: {error}") from None
    card = ModelCard(name=packed.name, files=packed.files, has_defaults=packed.has_defaults)
    if card.card_id != card_id or not packed.files.keys() >= set(REQUIRED_FILES):
        raise WireError("a model card that is not what its name says")
    return card
