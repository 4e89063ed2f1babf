"""Which models this gateway serves, under which names, and which live workers compute them.

A name is found by a request's `model`. What a record's log is rendered with follows from the card that its body names,
so any gateway renders it the same way, whatever the name means by then.

A gateway that was started with a model folder serves that model under its names; otherwise it serves whatever lives.
A worker that names a card has the model of that card; one without (an older one) is taken to have the gateway's own.

Workers under one name may differ in what they compute (their fingerprints do): while a model is replaced by another,
worker by worker, or where settings differ. New requests all go to the group of equal workers that has the most KV
memory, so that the tokens of equal requests are equal, and in a replacement the name moves when the new workers are no
fewer than the old ones. Requests that the others have stay theirs.

What changes is put in place whole, by the event loop; threads may look names up meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.health import HealthView
from gateway.library import FORGET_AFTER_S, ModelLibrary
from gateway.served_model import ModelText, ServedModel
from shared.bus import WorkerPulse
from shared.clock import Clock
from shared.errors import InvalidRequest, NotFound, Overloaded, shorten
from shared.messages import AdapterCard, RequestBody, WorkerHello


class ModelDirectory:
    """The models of one gateway. Call `look` after each poll of `health`, and `load_cards` every now and then.

    Args:
        own: the model that the gateway was started with, if it was.
        names: what clients may call that, the first one is used when a request names none. Without `own`: those that
            must have been served once before the gateway is ready.
    """

    def __init__(
        self, health: HealthView, library: ModelLibrary, clock: Clock, *, own: ModelText | None, names: tuple[str, ...]
    ) -> None:
        self._health = health
        self._library = library
        self._clock = clock
        self._own = own
        self._expected = names
        self._awaited = set() if own is not None else set(names)
        self._own_names = set() if own is None else {*names, own.folder.name}
        self._served = {name: ServedModel(name=name, text=own) for name in names if own is not None}
        self._seen_at: dict[str, float] = {}
        self._coming: frozenset[str] = frozenset()
        self._adapters: dict[str, AdapterCard] = {}

    def is_model(self, name: str) -> bool:
        """Whether a model, not an adapter, is served or expected under `name`."""
        return name in self._served or name in self._expected

    def take_adapters(self, cards: dict[str, AdapterCard]) -> None:
        """These are the adapters that are registered now."""
        self._adapters = cards

    def look(self) -> None:
        """Take in which workers live now."""
        if not self._health.is_bus_up:
            return
        found: dict[str, list[WorkerPulse]] = {}
        coming = set()
        for pulse in self._health.serving():
            is_known = self._text_of(pulse.hello) is not None
            for name in self._names_of(pulse.hello):
                found.setdefault(name, [])
                if is_known:
                    found[name].append(pulse)
                else:
                    coming.add(name)
        self._coming = frozenset(coming)
        self._served = self._serve({name: pulses for name, pulses in found.items() if pulses})
        self._library.forget_unused()

    async def load_cards(self) -> None:
        """Load the cards of live workers that are not known yet. Raises `BusError`."""
        cards = {pulse.hello.card for pulse in self._health.serving()} - {""}
        missing = sorted(card for card in cards if self._library.get(card) is None)
        for card in missing:
            await self._library.load(card)
        if missing:
            self.look()

    def find(self, name: str | None) -> ServedModel:
        """What a request means by `name`; by any thread.

        Raises:
            NotFound: a model that is not served.
            InvalidRequest: no name, and there are several models.
            Overloaded: it is expected, or workers have only just come.
        """
        served = self._served
        if name is None:
            return self._find_only(served)
        if name in served:
            return served[name]
        adapter = self._find_adapter(name)
        if adapter is not None:
            return adapter
        if name in self._expected or name in self._coming or not served:
            raise _no_worker()
        raise NotFound(f"model: {shorten(name)!r} is not served here; served: {_join(served)}", param="model",
                       code="model_not_found")  # fmt: skip

    async def find_text(self, body: RequestBody) -> ModelText | None:
        """What the log of a record with this body is rendered with; None: its model is not known here. Raises
        `BusError`."""
        if body.card:
            return self._library.get(body.card) or await self._library.load(body.card)
        served = self._served.get(body.model) or self._find_adapter(body.model)
        return None if served is None else served.text

    def list_served(self) -> list[ServedModel]:
        """What `/v1/models` shows: the gateway's own model, those that live, and adapters that some worker takes."""
        models = [s for s in self._served.values() if s.text is self._own or self.find_worker(s) is not None]
        adapters = [self._find_adapter(name) for name in sorted(self._adapters) if name not in self._served]
        return models + [s for s in adapters if s is not None and self.find_worker(s) is not None]

    def find_worker(self, served: ServedModel) -> WorkerHello | None:
        """The worker that a new request is checked against: of the group that gets it, the one that can hold the
        longest. None when no worker serves the model now."""
        group = _chosen_group(p for p in self._health.serving() if self._is_worker_of(served, p.hello))
        workers = [pulse.hello for pulse in group]
        return max(workers, key=lambda w: min(w.max_model_len, w.num_blocks * w.block_size), default=None)

    def require_worker(self, served: ServedModel) -> WorkerHello:
        """`find_worker`. Raises `Overloaded` when there is none."""
        worker = self.find_worker(served)
        if worker is None:
            raise _no_worker()
        return worker

    def max_model_len(self, served: ServedModel) -> int:
        """Tokens that a request may have now."""
        worker, own = self.find_worker(served), served.text.max_model_len
        return own if worker is None else min(own, worker.max_model_len)

    def close(self) -> None:
        """End what runs beside this process for its models."""
        self._library.close()

    def why_not_ready(self) -> list[str]:
        """Reasons why no tokens can be produced; empty: ready. The gateway's own model must be served if it has one,
        else any."""
        reasons = self._health.why_not_ready(self._is_wanted)
        return reasons + [f"no worker has served {shorten(name)} yet" for name in sorted(self._awaited)]

    def _serve(self, found: dict[str, list[WorkerPulse]]) -> dict[str, ServedModel]:
        """What is served when workers of these names live: they, the gateway's own, and what lived until lately."""
        now, served = self._clock.now(), dict(self._served)
        for name, pulses in sorted(found.items()):
            text = self._text_of(_chosen_group(pulses)[0].hello)
            assert text is not None
            if name not in served or served[name].text is not text:
                served[name] = ServedModel(name=name, text=text)
        self._seen_at |= dict.fromkeys(found, now)
        self._awaited -= found.keys()
        for name in [name for name, at in self._seen_at.items() if now - at > FORGET_AFTER_S]:
            del self._seen_at[name]
            if name not in self._own_names:
                del served[name]
        return {name: served[name] for name in sorted(served, key=self._place)}

    def _place(self, name: str) -> tuple[int, str]:
        """Where a name stands in lists: the gateway's own first, as they were given, then the others by alphabet."""
        is_own = self._own is not None and name in self._expected
        return (self._expected.index(name), "") if is_own else (len(self._expected), name)

    def _find_only(self, served: dict[str, ServedModel]) -> ServedModel:
        """The model of a request that names none."""
        if not served:
            raise _no_worker()
        first = next(iter(served.values()))
        if self._own is None and any(other.text is not first.text for other in served.values()):
            raise InvalidRequest(f"model: several models are served here, name one: {_join(served)}", param="model")
        return first

    def _text_of(self, worker: WorkerHello) -> ModelText | None:
        """The model of a worker, None while it is not known."""
        if worker.card:
            return self._library.get(worker.card)
        return self._own if self._is_of_own_name(worker) else None

    def _names_of(self, worker: WorkerHello) -> Collection[str]:
        """Under which names a worker is served here."""
        return self._expected if self._is_of_own_name(worker) else worker.served_names

    def _is_worker_of(self, served: ServedModel, worker: WorkerHello) -> bool:
        is_able = served.adapter is None or worker.max_loras > 0
        is_named = served.model_name in self._names_of(worker)
        return is_able and is_named and self._text_of(worker) is served.text

    def _find_adapter(self, name: str) -> ServedModel | None:
        """What an adapter's name stands for; None: there is none, or its model is not served."""
        card = self._adapters.get(name)
        model = None if card is None else self._served.get(card.model)
        return None if card is None or model is None else ServedModel(name=name, text=model.text, adapter=card)

    def _is_of_own_name(self, worker: WorkerHello) -> bool:
        return not self._own_names.isdisjoint(worker.served_names)

    def _is_wanted(self, worker: WorkerHello) -> bool:
        return self._text_of(worker) is not None and (self._own is None or self._is_of_own_name(worker))


def _no_worker() -> Overloaded:
    return Overloaded("no worker serves this model now; try again", retry_after_s=2, code="no_worker")


def _join(names: Iterable[str]) -> str:
    return shorten(", ".join(names))


def _chosen_group(pulses: Iterable[WorkerPulse]) -> list[WorkerPulse]:
    """Of the groups that compute the same the one with the most KV memory, of equal ones that which came last; empty
    when there are no workers."""
    groups: dict[tuple[str, str], list[WorkerPulse]] = {}
    for pulse in pulses:
        groups.setdefault((pulse.hello.card, pulse.hello.fingerprint), []).append(pulse)
    return max(groups.values(), key=_weight, default=[])


def _weight(group: list[WorkerPulse]) -> tuple[int, int]:
    """KV tokens, and how young its oldest member is, by the beats since it entered."""
    kv_tokens = sum(pulse.hello.num_blocks * pulse.hello.block_size for pulse in group)
    return kv_tokens, -max(pulse.beat for pulse in group)
