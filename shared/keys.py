"""Every Redis key: its name, type, writer, reader and life. A test fails when any other key is found.

| key | type | what | written by, read by | life |
|---|---|---|---|---|
| `live` | set | ids of requests that have not ended: the durable index | submit, end; leader | kept |
| `live_tokens` | string | sum of `reserved` over live requests | submit, end | kept; deleted when `live` is empty |
| `queue` | hash | `sequences`, `tokens` of queued requests | submit, dispatch, requeue, end; gateways | as above |
| `in_flight` | hash | tenant: its live requests | submit, end | as above |
| `spent` | hash | `requests:`, `tokens:`, `at:` + tenant that has limits | submit, end | kept, 3 fields an API key |
| `worked` | hash | `prefill:`, `decode:` + tenant: worker time, µs | commit; gateways | kept, 2 fields an API key |
| `req:{id}` | hash | the record, see `RECORD_FIELDS` | all scripts; all | TTL set by the end script only |
| `log:{id}` | string | the token log, `shared/log.py` | commit; gateways, workers | TTL with its record |
| `idem:{tenant}:{key}` | string | request id and body hash | submit | TTL with its record |
| `submit` | stream, a group | wake-ups for new requests; an ack deletes | submit; leader | kept |
| `inbox:{worker}` | stream | commands; an ack deletes | dispatch, preempt, end; worker | goes with its worker |
| `reports` | stream, capped | worker reports and ends; hints | workers, end; leader, gateways | kept |
| `leader` | hash | `token`, `beat`; `clock_ms`, `at_ms`: the cell's clock | leader; schedulers, submit | kept |
| `workers` | hash | `hello:`, `beat:`, `steps:`, `held:`, `suspect:`, `card:` + worker | workers; all | go with them |
| `gateways` | hash | `beat:` + gateway | gateways; leader | fields go with the gateway |
| `devices` | hash | device id: the worker that claimed it | workers | fields go with the worker |
| `prefix_key` | string | key of the names of prefixes (`shared/prefix.py`) | the first; workers, gateways | kept |
| `wish` | hash | `num_workers` that the leader would like, ids of those `leaving` | leader; who starts workers | kept |
| `card:{hash}` | string | a model's card, `shared/model_card.py` | workers; gateways | see `cards` |
| `cards` | sorted set | hash of a card: rises with each use; those that workers name, few others | workers | kept |
| `adapters` | hash | name: an adapter's `AdapterCard` | workers, gateways; gateways | kept until it is unloaded |
| `dead` | stream, capped | undecodable messages: source, bytes, why | all; people | kept |

Channel `tok:{gateway}` carries what the commit and end scripts appended, for the listeners of that gateway.
No live key has a TTL, since Redis expiry follows the wall clock.
"""

from __future__ import annotations

import hashlib

from shared.ids import GatewayId, RequestId, WorkerId

LIVE = "live"
LIVE_TOKENS = "live_tokens"
QUEUE = "queue"
IN_FLIGHT = "in_flight"
SPENT = "spent"
WORKED = "worked"
SUBMIT = "submit"
REPORTS = "reports"
LEADER = "leader"
WORKERS = "workers"
GATEWAYS = "gateways"
DEVICES = "devices"
PREFIX_KEY = "prefix_key"
WISH = "wish"
CARDS = "cards"
ADAPTERS = "adapters"
DEAD = "dead"
SUBMIT_GROUP = "schedulers"

STANDING_KEYS = frozenset(
    {LIVE, LIVE_TOKENS, QUEUE, IN_FLIGHT, SPENT, WORKED, SUBMIT, REPORTS, LEADER, WORKERS, GATEWAYS, DEVICES}
    | {PREFIX_KEY, WISH, CARDS, ADAPTERS, DEAD}
)
"""Keys that may exist when no request and no worker does (an empty one may be absent)."""

REPORTS_CAP = 10_000
DEAD_CAP = 1_000
SPARE_CARDS = 4
"""So many cards that no worker names any more are kept, the latest: streams of their models can still be rendered."""

RECORD_FIELDS = (
    "summary",  # SubmitRequest bytes
    "body",  # RequestBody bytes
    "state",  # queued, running, ended
    "order",  # submit stream id: FCFS order, kept over requeues
    "attempt",  # raised by dispatch only
    "owner",  # worker incarnation, "" when queued
    "listeners",  # msgpack array of [gateway, connection]
    "orphan_ttl_s",  # how long the request may run with no listener, 0 = ends at once
    "choices",  # how many there are
    "open",  # how many have not finished yet
    "reserved",  # tokens counted in `live_tokens`: prompts, and max_tokens for each choice
    "ttl_ms",  # how long the record stays after its end
    "preemptions",
    "crashes",
    "idem",  # name of its idempotency key, "" if none
    "tenant",  # where it counts in `in_flight` and `spent`
    "charged",  # tokens that its tenant spent on it in advance, 0 if there is no limit
    "len:{choice}",  # entries logged
    "stop:{choice}",  # entry index at which a stop string matched: entries past it are void
    "fin:{choice}",  # finish reason
    "work:{attempt}",  # what its worker computed for it, "prefill decode", in µs
    "prefill_us",  # the sums over attempts
    "decode_us",
    "reason",  # at the end: finished, cancelled, rejected, failed, deadline
    "prompt_tokens",  # set at submit: each prompt once
    "completion_tokens",
    "error_kind",
    "error_message",
)


def record(request_id: RequestId) -> str:
    """The record of a request."""
    return f"req:{request_id}"


def log(request_id: RequestId) -> str:
    """The token log of a request."""
    return f"log:{request_id}"


def idempotency(tenant: str, key: str) -> str:
    """Where an idempotency key of a tenant leads; hashed, since a client chose it."""
    return f"idem:{tenant}:{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def inbox(worker_id: WorkerId) -> str:
    """The command stream of a worker."""
    return f"inbox:{worker_id}"


def card(card_id: str) -> str:
    """The card of a model."""
    return f"card:{card_id}"


def token_channel(gateway_id: GatewayId) -> str:
    """The pub/sub channel of a gateway."""
    return f"tok:{gateway_id}"
