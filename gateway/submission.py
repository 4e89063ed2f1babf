"""Putting a request into the bus, or joining one that is there already; either way a delivery comes out."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass, field

from gateway import limits
from gateway.delivery import Delivery
from gateway.intake import Intake
from gateway.relay import RETRY_S, Listener
from gateway.served_model import ModelText
from gateway.state import Gateway
from shared.bus import NewRequest, SubmitAnswer, SubmitOutcome
from shared.errors import BusUnavailable, IdempotencyConflict, NotFound
from shared.failpoints import failpoint
from shared.ids import RequestId, is_request_id
from shared.messages import RequestBody, WorkerHello


@dataclass(frozen=True, slots=True)
class Submission:
    """`is_new`: not one that its idempotency key knew. `headers`: what its tenant has left."""

    delivery: Delivery
    is_new: bool
    headers: dict[str, str] = field(default_factory=dict)


async def submit(
    gateway: Gateway, intake: Intake, *, worker: WorkerHello, tenant: str, idempotency_key: str | None
) -> Submission:
    """Store the request; the delivery of its response.

    Raises:
        InvalidRequest: it is larger than its tenant may ever ask for.
        IdempotencyConflict: the key belongs to another body.
        RateLimited, Overloaded, BusError: it cannot be stored now.
    """
    summary = intake.summary(tenant=tenant, worker=worker, timeout_s=gateway.http.request_timeout_s)
    gateway.door.check(summary)
    body = dataclasses.replace(intake.body, has_idempotency_key=idempotency_key is not None)
    delivery = _deliver(gateway, gateway.relay.listen(intake.request_id), body, intake.served.text)
    prefixes = gateway.prefixes.name(body, tenant, worker.block_size) if worker.has_prefix_cache else ()
    new = NewRequest(
        summary=dataclasses.replace(summary, prefixes=prefixes),
        body=body,
        gateway_id=gateway.gateway_id,
        connection_id=delivery.connection_id,
        orphan_ttl_s=gateway.http.orphan_ttl_s if idempotency_key else 0.0,
        idempotency_key=idempotency_key,
        body_hash=intake.body_hash,
        tenant_limits=gateway.door.limits_of(tenant),
    )
    with ExitStack() as undo:
        undo.callback(delivery.leave)  # whatever goes wrong here, it may be stored all the same
        failpoint("gateway.before_submit", intake.request_id)
        outcome = await _insist_on_submit(gateway, new)
        undo.pop_all()
    if outcome.request_id == intake.request_id and outcome.answer in (SubmitAnswer.NEW, SubmitAnswer.EXISTS):
        return Submission(delivery, True, gateway.door.headers(tenant, outcome.budget))
    delivery.complete()
    return Submission(await _join_instead(gateway, outcome, tenant), False)


async def join(gateway: Gateway, request_id: str, tenant: str) -> Delivery:
    """A delivery of a request that is in the bus.

    Raises:
        NotFound: it is unknown, gone, or another tenant's.
    """
    known = RequestId(request_id) if is_request_id(request_id) else None
    record = None if known is None else await gateway.bus.load_record(known)
    body = None if known is None or record is None else await gateway.bus.load_body(known)
    if known is None or record is None or body is None or record.summary.tenant != tenant:
        raise NotFound("no such stream", code="stream_not_found")
    text = await gateway.directory.find_text(body)
    if text is None:
        raise NotFound("the stream's model is not known here any more", code="stream_not_found")
    listener = gateway.relay.listen(known)
    listener.refill()
    delivery = _deliver(gateway, listener, body, text)
    with ExitStack() as undo:
        undo.callback(delivery.leave)
        await gateway.bus.attach(known, gateway.gateway_id, listener.connection_id)
        undo.pop_all()
    return delivery


async def _join_instead(gateway: Gateway, outcome: SubmitOutcome, tenant: str) -> Delivery:
    if outcome.answer is SubmitAnswer.CONFLICT:
        raise IdempotencyConflict("Idempotency-Key: was used with another body", param="Idempotency-Key")
    if outcome.reason is not None:
        raise gateway.door.to_error(outcome, tenant)
    return await join(gateway, outcome.request_id, tenant)


async def _insist_on_submit(gateway: Gateway, new: NewRequest) -> SubmitOutcome:
    """Submit again when no answer came: the same id is stored once. Gives up after `limits.SUBMIT_PATIENCE_S`."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + limits.SUBMIT_PATIENCE_S
    while True:
        try:
            return await gateway.bus.submit(new)
        except BusUnavailable:
            if clock() >= deadline:
                raise
            await asyncio.sleep(RETRY_S)


def _deliver(gateway: Gateway, listener: Listener, body: RequestBody, text: ModelText) -> Delivery:
    return Delivery(
        bus=gateway.bus,
        gateway_id=gateway.gateway_id,
        listener=listener,
        body=body,
        token_text=text.token_text,
        background=gateway.background,
        timeout_s=gateway.http.request_timeout_s,
    )
