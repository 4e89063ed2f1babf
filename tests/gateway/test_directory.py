"""Which models a gateway finds under which names, and which workers it gives their requests to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.directory import ModelDirectory
from gateway.health import HealthSettings, HealthView
from gateway.library import FORGET_AFTER_S, ModelLibrary
from gateway.model_folder import load_model_folder
from gateway.served_model import ModelText
from shared.clock import ManualClock
from shared.errors import InvalidRequest, NotFound, Overloaded
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import RequestBody, SamplingParams, WorkerHello
from shared.model_card import pack_card, read_card
from shared.model_files import ModelFiles
from tests.gateway.tiny_model import make_model_folder


class Cell:
    """Workers that say hello and live on, and the directory of a gateway.

    Args:
        folder: the gateway's own model, which it serves as `names`; None: it waits for these.
    """

    def __init__(self, folder: Path | None, names: tuple[str, ...]) -> None:
        self.bus, self.clock = MemoryBus(), ManualClock()
        settings = HealthSettings(worker_lease_s=3.0, leader_lease_s=1.5)
        self.health = HealthView(self.bus, self.clock, settings)
        own = (
            None
            if folder is None
            else ModelText(load_model_folder(folder), 512, read_card(ModelFiles(model=folder)).card_id)
        )
        self.library = ModelLibrary(self.bus, self.clock, max_model_len=None, own=own)
        self.directory = ModelDirectory(self.health, self.library, self.clock, own=own, names=names)

    async def enter(self, name: str, **hello: object) -> None:
        """A worker comes."""
        settings = {"model": "tiny", "fingerprint": "f1", "dtype": "float32", "device": "cpu", "max_model_len": 512,
                    "block_size": 16, "num_blocks": 64, "max_num_seqs": 8, "pid": 1, "host": "here"}  # fmt: skip
        await self.bus.hello(WorkerHello(worker_id=WorkerId(f"{name}:1"), **(settings | hello)))  # type: ignore[arg-type]
        await self.look()

    async def enter_with(self, name: str, folder: Path, **hello: object) -> None:
        """A worker comes with the card of the model in `folder`, under its name."""
        card = read_card(ModelFiles(model=folder))
        await self.bus.put_card(card.card_id, pack_card(card))
        await self.enter(name, **({"model": folder.name, "card": card.card_id, "fingerprint": folder.name} | hello))

    async def look(self, seconds: float = 0.0) -> None:
        """The gateway looks, after a while in which everybody beats."""
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            await self.beat()
            await self.health.poll()
        await self.health.poll()
        self.directory.look()

    async def beat(self) -> None:
        """Everybody who is there beats."""
        for pulse in await self.bus.read_workers():
            await self.bus.beat(pulse.hello.worker_id, 1, [])

    async def leave(self, name: str) -> None:
        """It goes."""
        await self.bus.bye(WorkerId(f"{name}:1"))
        await self.look()

    def worker_of(self, name: str | None) -> str | None:
        """The worker that a request to model `name` is checked against."""
        worker = self.directory.find_worker(self.directory.find(name))
        return None if worker is None else worker.worker_id.partition(":")[0]


@pytest.fixture
def cell(tiny_folder: Path) -> Cell:
    return Cell(tiny_folder, ("tiny", "small"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template and of another size."""
    return make_model_folder(tmp_path_factory.mktemp("m") / "other", template=None, max_position_embeddings=256)


def names_of(cell: Cell) -> list[str]:
    return [served.name for served in cell.directory.list_served()]


async def test_a_model_is_found_under_each_of_its_names(cell: Cell) -> None:
    """Every served name, and no name at all, should lead to the model; an unknown one be refused naming those known."""
    for name in (None, "tiny", "small"):
        assert cell.worker_of(name) is None
    await cell.enter("a", names=("other", "tiny"), model="other")
    for name in (None, "tiny", "small"):
        assert cell.worker_of(name) == "a"
    with pytest.raises(NotFound, match="'huge' is not served here; served: tiny, small"):
        cell.directory.find("huge")


async def test_a_replacement_takes_the_name_when_it_is_no_smaller(cell: Cell) -> None:
    """Of workers that compute differently those with the most KV memory together should get what is new; within a
    group the one that can hold the longest request is asked."""
    await cell.enter("old1")
    await cell.enter("old2", max_model_len=600)
    await cell.beat()
    await cell.enter("new1", max_model_len=700, fingerprint="f2")
    assert cell.worker_of("tiny") == "old2"
    await cell.beat()
    await cell.enter("new2", fingerprint="f2")
    assert cell.worker_of("tiny") == "new1"
    await cell.leave("new1")
    await cell.leave("new2")
    assert cell.worker_of("tiny") == "old2"


async def test_without_a_folder_whatever_lives_is_served(tiny_folder: Path, other_folder: Path) -> None:
    """A gateway without a model should learn models from workers' cards, and list those that live. Until a card is
    loaded, and when the last worker has just gone, its model's requests should be put off; later it is unknown."""
    cell = Cell(None, ())
    with pytest.raises(Overloaded):
        cell.directory.find("tiny")
    await cell.enter_with("a", tiny_folder)
    with pytest.raises(Overloaded):
        cell.directory.find("tiny")
    await cell.directory.load_cards()
    assert (cell.worker_of("tiny"), cell.worker_of(None)) == ("a", "a")
    await cell.enter_with("b", other_folder, names=("other", "alias"))
    await cell.directory.load_cards()
    assert (cell.worker_of("tiny"), cell.worker_of("other"), cell.worker_of("alias")) == ("a", "b", "b")
    assert [cell.directory.find(name).text.max_model_len for name in ("tiny", "alias")] == [512, 256]
    assert names_of(cell) == ["alias", "other", "tiny"]
    with pytest.raises(NotFound, match="served: alias, other, tiny"):
        cell.directory.find("huge")
    with pytest.raises(InvalidRequest, match="several models are served here, name one: alias, other, tiny"):
        cell.directory.find(None)
    await cell.leave("a")
    assert cell.worker_of("tiny") is None
    assert names_of(cell) == ["alias", "other"]
    await cell.look(FORGET_AFTER_S + 1)
    with pytest.raises(NotFound):
        cell.directory.find("tiny")
    assert cell.worker_of(None) == "b"


async def test_readiness_waits_for_the_expected_models_once(tiny_folder: Path, other_folder: Path) -> None:
    """A gateway that was told names should be ready when each has been served, and stay so while any model lives."""
    cell = Cell(None, ("tiny", "other"))
    await cell.bus.take_lead("t", await cell.bus.read_leader())
    await cell.enter_with("a", tiny_folder)
    await cell.directory.load_cards()
    assert cell.directory.why_not_ready() == ["no worker has served other yet"]
    with pytest.raises(Overloaded):
        cell.directory.find("other")
    await cell.enter_with("b", other_folder)
    await cell.directory.load_cards()
    assert cell.directory.why_not_ready() == []
    await cell.leave("a")
    assert cell.directory.why_not_ready() == []
    await cell.leave("b")
    assert cell.directory.why_not_ready() == ["no live worker"]


async def test_another_card_takes_a_name_when_it_is_no_smaller(tiny_folder: Path, other_folder: Path) -> None:
    """While workers with another tokenizer replace those of a name, each request should be read with the tokenizer of
    the workers that it goes to, and logs of earlier requests be rendered with theirs."""
    cell = Cell(tiny_folder, ("tiny",))
    await cell.enter_with("old", tiny_folder)
    await cell.enter_with("old2", tiny_folder)
    old = cell.directory.find("tiny").text
    await cell.beat()
    await cell.enter_with("new", other_folder, model="tiny")
    await cell.directory.load_cards()
    assert (cell.directory.find("tiny").text, cell.worker_of("tiny")) == (old, "old")
    await cell.leave("old2")
    new = cell.directory.find("tiny").text
    assert (new.folder.name, cell.worker_of("tiny")) == ("other", "new")
    await cell.leave("old")
    body = RequestBody(kind="chat", model="tiny", created=0, prompts=((1,),), n=1,
                       sampling=SamplingParams(seed=0, max_tokens=1), card=old.card_id)  # fmt: skip
    assert await cell.directory.find_text(body) is old
    other_gateway = ModelLibrary(cell.bus, cell.clock, max_model_len=None, own=None)
    assert (loaded := await other_gateway.load(old.card_id)) is not None
    assert loaded.folder.name == "tiny"


async def test_a_bad_card_is_refused_once(cell: Cell) -> None:
    """A card that cannot be read should serve nothing, and not be tried again and again."""
    await cell.bus.put_card("bad", b"no card")
    await cell.enter("a", model="x", card="bad")
    for _ in range(2):
        await cell.directory.load_cards()
    with pytest.raises(Overloaded):
        cell.directory.find("x")
    assert names_of(cell) == ["tiny", "small"]
