"""Which models this gateway serves, under which names, and which live workers compute them.

A name is found by a request's `model`. What a record's log is rendered with follows from the record's body, so any
gateway renders it the same way.

Workers under one name may differ in what they compute (their fingerprints do): while a model is replaced by another,
worker by worker, or where settings differ. New requests all go to the group of equal workers that has the most KV
memory, so that the tokens of equal requests are equal, and in a replacement the name moves when the new workers are no
fewer than the old ones. Requests that the others have stay theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.health import HealthView
from gateway.served_model import ModelText, ServedModel
from shared.bus import WorkerPulse
from shared.errors import NotFound, shorten
from shared.messages import RequestBody, WorkerHello


class ModelDirectory:
    """The models of one gateway.

    Args:
        text: the model that the gateway was started with.
        names: what clients may call it; the first one is used when a request names none.
    """

    def __init__(self, health: HealthView, text: ModelText, names: tuple[str, ...]) -> None:
        self._health = health
        self._text = text
        self._served = {name: ServedModel(name=name, text=text) for name in names}
        self._worker_names = {*names, text.folder.name}

    def find(self, name: str | None) -> ServedModel:
        """What a request means by `name`; by any thread. Raises `NotFound` for a model that is not served."""
        served = self._served
        if name is None:
            return next(iter(served.values()))
        if name not in served:
            shown = shorten(", ".join(served))
            raise NotFound(f"model: {shorten(name)!r} is not served here; served: {shown}", param="model",
                           code="model_not_found")  # fmt: skip
        return served[name]

    def find_text(self, body: RequestBody) -> ModelText | None:
        """What the log of a record with this body is rendered with; None: this gateway serves another model."""
        served = self._served.get(body.model)
        return None if served is None else served.text

    def list_served(self) -> list[ServedModel]:
        """What `/v1/models` shows."""
        return list(self._served.values())

    def find_worker(self, served: ServedModel) -> WorkerHello | None:
        """The worker that a new request is checked against: of the group that gets it, the one that can hold the
        longest. None when no worker serves the model now."""
        group = _chosen_group(p for p in self._health.serving() if self._is_worker_of(served, p.hello))
        workers = [pulse.hello for pulse in group]
        return max(workers, key=lambda w: min(w.max_model_len, w.num_blocks * w.block_size), default=None)

    def max_model_len(self, served: ServedModel) -> int:
        """Tokens that a request may have now."""
        worker, own = self.find_worker(served), served.text.max_model_len
        return own if worker is None else min(own, worker.max_model_len)

    def why_not_ready(self) -> list[str]:
        """Reasons why no tokens can be produced; empty: ready."""
        return self._health.why_not_ready(self._is_ours)

    def _is_worker_of(self, served: ServedModel, worker: WorkerHello) -> bool:
        return served.text is self._text and self._is_ours(worker)

    def _is_ours(self, worker: WorkerHello) -> bool:
        return not self._worker_names.isdisjoint(worker.served_names)


def _chosen_group(pulses: Iterable[WorkerPulse]) -> list[WorkerPulse]:
    """Of the groups that compute the same the one with the most KV memory, of equal ones that which came last; empty
    when there are no workers."""
    groups: dict[str, list[WorkerPulse]] = {}
    for pulse in pulses:
        groups.setdefault(pulse.hello.fingerprint, []).append(pulse)
    return max(groups.values(), key=_weight, default=[])


def _weight(group: list[WorkerPulse]) -> tuple[int, int]:
    """KV tokens, and how young its oldest member is, by the beats since it entered."""
    kv_tokens = sum(pulse.hello.num_blocks * pulse.hello.block_size for pulse in group)
    return kv_tokens, -max(pulse.beat for pulse in group)
