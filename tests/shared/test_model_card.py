"""Model cards: named by what is in them, the same after a journey, and never more than they may be."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from shared import model_card
from shared.errors import ConfigError, WireError
from shared.model_card import pack_card, read_card, unpack_card
from shared.model_files import ModelFiles
from tests.gateway.tiny_model import make_model_folder


def test_a_card_is_the_same_after_its_journey(tmp_path: Path) -> None:
    """Name and files should come back, byte by byte; weights and other files are no part of it."""
    folder = make_model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"weights")
    card = read_card(ModelFiles(model=folder))
    back = unpack_card(card.card_id, pack_card(card))
    assert (back.name, back.files, back.card_id) == (card.name, card.files, card.card_id)
    assert set(back.files) == {"tokenizer.json", "config.json", "tokenizer_config.json"}


def test_any_change_is_another_card(tmp_path: Path) -> None:
    """Each file, its absence, and the folder's name should be in the name of the card."""
    folder = make_model_folder(tmp_path / "m")
    ids = [read_card(ModelFiles(model=folder)).card_id]
    (folder / "generation_config.json").write_bytes(b"")
    ids.append(read_card(ModelFiles(model=folder)).card_id)
    (folder / "generation_config.json").write_bytes(b"{}")
    ids.append(read_card(ModelFiles(model=folder)).card_id)
    ids.append(read_card(ModelFiles(model=folder.rename(tmp_path / "n"))).card_id)
    assert len(set(ids)) == 4


@pytest.mark.parametrize("data", [b"", b"no card", zlib.compress(b"no map"), zlib.compress(b"\x80")])
def test_what_is_no_card_is_refused(data: bytes) -> None:
    """Anything else should be a `WireError`."""
    with pytest.raises(WireError):
        unpack_card("x", data)


def test_a_card_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    """The name should be checked against the content, and a cut one be refused."""
    card = read_card(ModelFiles(model=make_model_folder(tmp_path / "m")))
    data = pack_card(card)
    for card_id, sent in (("other", data), (card.card_id, data[:-9])):
        with pytest.raises(WireError):
            unpack_card(card_id, sent)


def test_a_card_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the limit should be refused where it is read from a folder, and where it is unpacked."""
    card = read_card(ModelFiles(model=make_model_folder(tmp_path / "m")))
    data = pack_card(card)
    monkeypatch.setattr(model_card, "MAX_CARD_BYTES", 1000)
    with pytest.raises(WireError, match="larger than"):
        unpack_card(card.card_id, data)
    with pytest.raises(ConfigError, match="at most"):
        read_card(ModelFiles(model=tmp_path / "m"))
