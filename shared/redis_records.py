"""The hash `req:{id}` to and from our types."""

from __future__ import annotations

from typing import Any

import msgspec

from shared import keys, wire
from shared.bus import (
    BusLimits,
    ChoiceState,
    NewRequest,
    RequestRecord,
    RequestState,
    SubmitAnswer,
    SubmitOutcome,
)
from shared.errors import WireError
from shared.ids import RequestId, WorkerId
from shared.limits import QueueDepth, RefusalReason, TenantBudget
from shared.messages import RequestEnded, SubmitRequest
from shared.redis_connection import Argument
from shared.redis_scripts import RECORD_REPLY_FIELDS
from shared.work_time import WorkTime

Listeners = list[tuple[str, str]]

_encode = msgspec.msgpack.Encoder().encode
_listeners = msgspec.msgpack.Decoder(Listeners)


def submit_arguments(request: NewRequest, limits: BusLimits, memory_high: str) -> list[Argument]:
    """What the submit script takes, in its order."""
    summary, key = request.summary, request.idempotency_key
    return [
        summary.request_id,
        wire.encode(summary),
        wire.encode(request.body),
        _encode([(request.gateway_id, request.connection_id)]),
        "" if key is None else keys.idempotency(summary.tenant, key),
        request.body_hash,
        summary.num_choices,
        sum(summary.prompt_lens),
        summary.num_reserved_tokens,
        request.orphan_ttl_s,
        int(limits.record_ttl_s * 1000),
        limits.max_live_requests,
        limits.max_live_tokens,
        memory_high,
        _or_empty(limits.max_queued_requests),
        _or_empty(limits.max_queued_tokens),
        summary.tenant,
        _or_empty(request.tenant_limits.requests_per_minute),
        _or_empty(request.tenant_limits.tokens_per_minute),
        _or_empty(request.tenant_limits.max_in_flight),
    ]


def parse_outcome(reply: list[Any]) -> SubmitOutcome:
    """What the submit script answered."""
    answer, request_id = SubmitAnswer(reply[0].decode()), RequestId(reply[1].decode())
    if len(reply) == 2:
        return SubmitOutcome(answer, request_id)
    detail, reason, wait_ms, num_sequences, num_tokens, requests_left, tokens_left = reply[2:]
    return SubmitOutcome(
        answer,
        request_id,
        detail=detail.decode(),
        reason=RefusalReason(reason.decode()) if reason else None,
        wait_s=wait_ms / 1000,
        queued=QueueDepth(num_sequences=num_sequences, num_tokens=num_tokens),
        budget=TenantBudget(num_requests=_or_none(requests_left), num_tokens=_or_none(tokens_left)),
    )


def _or_empty(limit: int | None) -> int | str:
    return "" if limit is None else limit


def _or_none(left: int) -> int | None:
    return None if left < 0 else left


def parse_record(request_id: RequestId, row: list[Any]) -> RequestRecord:
    """The record of `request_id` in one row of the load script's reply.

    Raises:
        WireError: it is not readable, or contradicts itself.
    """
    fields = dict(zip(RECORD_REPLY_FIELDS, row, strict=False))
    choices = row[len(RECORD_REPLY_FIELDS) :]
    try:
        summary = wire.decode(fields["summary"], SubmitRequest)
        state = RequestState(fields["state"].decode())
        if (summary.request_id, 3 * summary.num_choices) != (request_id, len(choices)):
            raise ValueError(f"{request_id} with {len(choices) // 3} choices is not what was submitted")
        if (state is RequestState.RUNNING and not fields["owner"]) or (
            state is RequestState.QUEUED and fields["owner"]
        ):
            raise ValueError(f"{state} with owner {fields['owner']!r}")
        milliseconds, _, sequence = fields["order"].decode().partition("-")
        return RequestRecord(
            summary=summary,
            state=state,
            order=(int(milliseconds), int(sequence)),
            attempt=int(fields["attempt"]),
            owner=WorkerId(fields["owner"].decode()) if fields["owner"] else None,
            listeners=tuple(_listeners.decode(fields["listeners"])),  # type: ignore[arg-type]  # ids are strings
            orphan_ttl_s=float(fields["orphan_ttl_s"]),
            preemptions=int(fields["preemptions"]),
            crashes=int(fields["crashes"]),
            choices=tuple(_parse_choice(*choices[i : i + 3]) for i in range(0, len(choices), 3)),
            ended=_parse_ended(summary, fields) if state is RequestState.ENDED else None,
            worked=WorkTime(int(fields["prefill_us"] or 0), int(fields["decode_us"] or 0)),
        )
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise WireError(f"a record that cannot be read: {error}") from None


def _parse_choice(length: bytes | None, stop: bytes | None, finish: bytes | None) -> ChoiceState:
    return ChoiceState(
        num_entries=int(length or 0),
        stop_index=None if stop is None else int(stop),
        finish=(finish or b"").decode(),
    )


def _parse_ended(summary: SubmitRequest, fields: dict[str, Any]) -> RequestEnded:
    return RequestEnded(
        request_id=summary.request_id,
        reason=fields["reason"].decode(),
        prompt_tokens=int(fields["prompt_tokens"]),
        completion_tokens=int(fields["completion_tokens"]),
        error_kind=fields["error_kind"].decode(),
        error_message=fields["error_message"].decode(),
    )
