"""Token ids to text, one token at a time, never breaking a character.

The text of a choice is a pure function of its token ids, whatever packets they came in; the pieces that `feed` and
`finish` return join to `tokenizer.decode(ids, skip_special_tokens=True)`. Two ways:

* **Table.** For decoders that only join bytes (byte-level BPE; SentencePiece with byte fallback) each id has its bytes
  in a table, and an incremental UTF-8 decoder joins them: O(1) a token. One difference is on purpose: bytes that are
  not UTF-8 become U+FFFD one by one as Unicode says, while the byte-fallback decoder of `tokenizers` replaces a whole
  run of byte tokens as soon as one of them is wrong, good characters too; a stream cannot take those back.
* **Window.** For any other decoder, decode a short window of ids before and after the new one and take the
  difference (the idea is from Hugging Face's text-generation-inference). A window that ends in U+FFFD waits.

Special tokens have no text. Ids that the tokenizer does not know have none either.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, Protocol

from tokenizers import Tokenizer

from gateway.model_folder import ModelFolder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


class Detokenizer(Protocol):
    """The text of one choice, growing."""

    def feed(self, token_id: int) -> str:
        """The characters that `token_id` completes; may be empty."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing."""
        ...


class TokenText:
    """Text of tokens for one model; shared by all requests."""

    def __init__(self, folder: ModelFolder) -> None:
        self._tokenizer = folder.tokenizer
        self._special = {
            id_: token.content for id_, token in folder.tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._table = _make_table(folder)
        self.end_ids = frozenset(folder.eos_ids)
        """Tokens that end an answer of this model."""
        self._texts = dict.fromkeys(self._special, "")
        self._strips_space = self._table is not None and _strips_leading_space(folder.decoder_spec)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which has no text."""
        return token_id in self._special

    def new_detokenizer(self) -> Detokenizer:
        """A detokenizer for a new choice."""
        if self._table is None:
            return _WindowDetokenizer(self._tokenizer)
        return _TableDetokenizer(self._table, self._texts, strips_space=self._strips_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that stand for one token where logprobs name it; control tokens by their spelling."""
        if token_id in self._special:
            return self._special[token_id].encode()
        if self._table is not None:
            return self._table.get(token_id, b"")
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def token_name(self, token_id: int) -> str:
        r"""The token as text; one that is only a part of a character is spelled `bytes:\xf0\x9f`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _TableDetokenizer:
    """`texts` is shared by all: the text of each token, seen so far, that neither begins nor ends within a character.
    Control tokens are in it from the start, without text."""

    def __init__(self, table: dict[int, bytes], texts: dict[int, str], *, strips_space: bool) -> None:
        self._table = table
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False
        self._strips_space = strips_space

    def feed(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None or (self._is_within and text):
            text = self._decode(token_id)
        return self._strip(text) if self._strips_space else text

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", True))

    def _decode(self, token_id: int) -> str:
        was_within = self._is_within
        text = self._decoder.decode(self._table.get(token_id, b""))
        self._is_within = bool(self._decoder.getstate()[0])
        if not was_within and not self._is_within:
            self._texts[token_id] = text
        return text

    def _strip(self, text: str) -> str:
        """Drop one space at the very start of the text, where the tokenizer's decoder does."""
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class _WindowDetokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._decode(self._read), self._decode(len(self._ids))
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        return self._decode(len(self._ids))[len(self._decode(self._read)) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)


def _make_table(folder: ModelFolder) -> dict[int, bytes] | None:
    """Bytes by id, None when the decoder is not one that joins bytes."""
    to_bytes = _table_rule(folder.decoder_spec)
    if to_bytes is None:
        return None
    vocab: dict[str, int] = folder.tokenizer.get_vocab(with_added_tokens=True)
    return {id_: to_bytes(token) for token, id_ in vocab.items()}


def _table_rule(spec: dict[str, Any] | None) -> Any:
    kinds = _kinds(spec)
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _byte_fallback_bytes if _replaces_metaspace(spec) else None
    return None


def _kinds(spec: dict[str, Any] | None) -> list[str]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [kind for part in spec["decoders"] for kind in _kinds(part)]
    return [spec["type"]]


def _replaces_metaspace(spec: dict[str, Any] | None) -> bool:
    first = spec["decoders"][0] if spec else {}
    strip = [part for part in (spec or {}).get("decoders", ()) if part["type"] == "Strip"]
    is_known_strip = all((part["content"], part["start"], part["stop"]) == (" ", 1, 0) for part in strip)
    return bool(first.get("pattern") == {"String": _METASPACE} and first.get("content") == " " and is_known_strip)


def _strips_leading_space(spec: dict[str, Any] | None) -> bool:
    return "Strip" in _kinds(spec)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes stand for themselves, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    token = token.replace(_METASPACE, " ")
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()
