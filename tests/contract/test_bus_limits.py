"""What the submit script refuses: too much that waits, and what a tenant may not have; and the counts behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared import keys
from shared.bus import Bus, BusLimits, RequestState, SubmitOutcome
from shared.ids import RequestId
from shared.limits import MINUTE_MS, QueueDepth, RefusalReason, TenantBudget, TenantLimits
from shared.memory_bus import MemoryBus
from tests.contract.cell import TOKEN, W1, W2, Cell, Probe, RedisProbe, RequestSpec, make_hello, make_request

NOTHING = QueueDepth()
ONE = QueueDepth(num_sequences=2, num_tokens=5)
"""A request of one prompt of 5 tokens with 2 choices."""


async def ask(bus: Bus, **spec: Any) -> SubmitOutcome:
    """What a submit is answered."""
    return await bus.submit(make_request(RequestSpec(**spec)))


async def submit_one(cell: Cell) -> RequestId:
    return await cell.submit(prompt_lens=(5,), n=2, max_tokens=8)


async def test_what_waits_is_counted(cell: Cell) -> None:
    """A request should count as queued from its submit to its dispatch, with its choices and its prompt once."""
    assert await cell.bus.read_queue() == NOTHING
    request_id = await submit_one(cell)
    other = await cell.submit(prompt_lens=(3, 4))
    assert await cell.bus.read_queue() == QueueDepth(num_sequences=4, num_tokens=12)
    await cell.dispatch(other)
    assert await cell.bus.read_queue() == ONE
    await cell.dispatch(request_id)
    assert await cell.bus.read_queue() == NOTHING
    assert (await cell.bus.dispatch(TOKEN, request_id, W1, 1)).answer == "not_queued"
    assert await cell.bus.read_queue() == NOTHING


async def hello_again(cell: Cell) -> None:
    await cell.bus.hello(make_hello(type(W1)("w1:cc")))
    await cell.bus.bye(type(W1)("w1:cc"))


GIVING_BACK: dict[str, Callable[[Cell, RequestId], Awaitable[object]]] = {
    "release": lambda cell, id_: cell.bus.release(W1, id_, 1, is_preempted=True),
    "requeue": lambda cell, id_: cell.bus.requeue(TOKEN, W1),
    "requeue one": lambda cell, id_: cell.bus.requeue_one(TOKEN, id_, W1, 1),
    "hello": lambda cell, id_: hello_again(cell),
}


@pytest.mark.parametrize("how", GIVING_BACK)
async def test_what_is_given_back_waits_again(cell: Cell, how: str) -> None:
    """A request that its worker gave back or lost should count as queued again, once."""
    await submit_one(cell)
    request_id = await cell.run(prompt_lens=(9,))
    for _ in range(2):
        await GIVING_BACK[how](cell, request_id)
        assert await cell.bus.read_queue() == QueueDepth(num_sequences=3, num_tokens=14)


@pytest.mark.parametrize("is_running", [True, False])
async def test_what_has_ended_waits_no_more(cell: Cell, is_running: bool) -> None:
    """An end should take a queued request out of the count, and a running one not a second time."""
    await submit_one(cell)
    request_id = await (cell.run() if is_running else cell.submit())
    for _ in range(2):
        await cell.bus.end(request_id, "cancelled")
        assert await cell.bus.read_queue() == ONE


async def test_a_full_queue_refuses_until_one_runs(open_limited: Callable[[BusLimits], Bus]) -> None:
    """Beyond `max_queued_requests` sequences nothing more should wait, whatever runs; a refusal tells the depth."""
    cell = await Cell.start(open_limited(BusLimits(max_queued_requests=3)))
    for _ in range(3):
        await cell.run()
    first = await submit_one(cell)
    await cell.submit()
    refused = await ask(cell.bus)
    assert (refused.answer, refused.reason) == ("full", RefusalReason.QUEUED_REQUESTS)
    assert (refused.detail, refused.queued) == ("queued requests: at most 3", QueueDepth(num_sequences=3, num_tokens=8))
    await cell.dispatch(first)
    await cell.submit(n=2)
    assert (await ask(cell.bus)).answer == "full"


async def test_too_many_queued_tokens_refuse(open_limited: Callable[[BusLimits], Bus]) -> None:
    """`max_queued_tokens` should bound the prompts that wait, each once, and not what they may become."""
    cell = await Cell.start(open_limited(BusLimits(max_queued_tokens=10)))
    first = await cell.submit(prompt_lens=(6,), max_tokens=1000, n=3)
    await cell.submit(prompt_lens=(4,))
    refused = await ask(cell.bus, prompt_lens=(1,))
    assert (refused.answer, refused.reason) == ("full", RefusalReason.QUEUED_TOKENS)
    await cell.dispatch(first)
    assert (await ask(cell.bus, prompt_lens=(7,))).answer == "full"
    assert (await ask(cell.bus, prompt_lens=(6,))).answer == "new"


async def test_an_empty_queue_takes_any_request(open_limited: Callable[[BusLimits], Bus]) -> None:
    """A request larger than the queue may be should be taken when nothing waits, or it never would."""
    cell = await Cell.start(open_limited(BusLimits(max_queued_requests=2, max_queued_tokens=10)))
    request_id = await cell.submit(prompt_lens=(30,), n=5)
    assert (await ask(cell.bus)).answer == "full"
    await cell.dispatch(request_id)
    assert (await ask(cell.bus)).answer == "new"


class Clock:
    """The leader's monotonic clock, told to the cell."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.now_ms = 5_000_000

    async def start(self) -> None:
        await self.bus.take_lead(TOKEN, await self.bus.read_leader())
        await self.bus.raise_lead(TOKEN, self.now_ms)

    async def tick(self, ms: int) -> None:
        self.now_ms += ms
        await self.bus.raise_lead(TOKEN, self.now_ms)


@pytest.fixture
async def clock(bus: Bus) -> Clock:
    one = Clock(bus)
    await one.start()
    return one


REQUESTS = {"tenant_limits": TenantLimits(requests_per_minute=3)}
TOKENS = {"tenant_limits": TenantLimits(tokens_per_minute=100), "prompt_lens": (10,)}


@pytest.fixture
async def own(bus: Bus) -> Any:
    """Ends what the test left live."""
    yield bus
    for request_id in await bus.list_live():
        await bus.end(request_id, "cancelled")


async def test_requests_per_minute(own: Bus, clock: Clock) -> None:
    """A minute's requests should go through at once, and then one each time that its share of a minute has passed."""
    left = [(await ask(own, **REQUESTS)).budget.num_requests for _ in range(3)]
    assert left == [2, 1, 0]
    refused = await ask(own, **REQUESTS)
    assert (refused.answer, refused.reason, refused.wait_s) == ("limited", RefusalReason.TENANT_REQUESTS, 20.0)
    assert refused.detail == "requests per minute: at most 3"
    await clock.tick(19_999)
    assert (await ask(own, **REQUESTS)).wait_s == 0.001
    await clock.tick(1)
    assert (await ask(own, **REQUESTS)).answer == "new"
    assert (await ask(own, **REQUESTS)).wait_s == 20.0
    await clock.tick(10 * MINUTE_MS)
    assert [(await ask(own, **REQUESTS)).answer for _ in range(4)] == ["new"] * 3 + ["limited"]


async def test_a_refused_request_costs_nothing(own: Bus, clock: Clock) -> None:
    """Refusals by one limit should take nothing out of the other's bucket, nor put off the next request."""
    both = TenantLimits(requests_per_minute=3, tokens_per_minute=30)
    small, large = {"prompt_lens": (2,), "max_tokens": 8}, {"prompt_lens": (2,), "max_tokens": 19}
    assert (await ask(own, tenant_limits=both, **small)).budget == TenantBudget(num_requests=2, num_tokens=20)
    for _ in range(5):
        refused = await ask(own, tenant_limits=both, **large)
        assert (refused.answer, refused.reason, refused.wait_s) == ("limited", RefusalReason.TENANT_TOKENS, 2.0)
        assert refused.budget == TenantBudget(num_requests=2, num_tokens=20)
    assert (await ask(own, tenant_limits=both, **small)).budget == TenantBudget(num_requests=1, num_tokens=10)


async def test_the_same_submit_again_costs_nothing(own: Bus, clock: Clock) -> None:
    """A repeated id, and a repeated idempotency key, should be charged once."""
    request = make_request(RequestSpec(**REQUESTS, idempotency_key="k", body_hash="h"))
    answers = [(await own.submit(request)).answer for _ in range(5)]
    answers += [(await ask(own, **REQUESTS, idempotency_key="k", body_hash="h")).answer for _ in range(5)]
    assert answers == ["new"] + ["exists"] * 9
    assert [(await ask(own, **REQUESTS)).answer for _ in range(3)] == ["new", "new", "limited"]


async def test_tokens_per_minute_are_reserved_and_corrected(own: Bus, clock: Clock) -> None:
    """Prompt and max_tokens of all choices should be paid in advance, and what was not used come back at the end."""
    await own.hello(make_hello(W1))
    cell = Cell(own)
    outcome = await ask(own, **TOKENS, n=2, max_tokens=40)
    assert outcome.budget.num_tokens == 10
    refused = await ask(own, **TOKENS, max_tokens=20)
    assert (refused.reason, refused.wait_s) == (RefusalReason.TENANT_TOKENS, 12.0)
    await cell.dispatch(outcome.request_id)
    await cell.commit(outcome.request_id, 0, 7, 7, 7, reason="stop")
    await cell.commit(outcome.request_id, 0, 7, 7, reason="stop", choice=1)
    second = await ask(own, **TOKENS, max_tokens=20)
    assert (second.answer, second.budget.num_tokens) == ("new", 100 - 15 - 30)
    await own.end(second.request_id, "cancelled")
    assert (await ask(own, **TOKENS, max_tokens=75)).budget.num_tokens == 0
    await own.bye(W1)


async def test_tenants_have_buckets_of_their_own(own: Bus, clock: Clock) -> None:
    """What one tenant spends should not be another's loss."""
    for tenant in ("a", "b"):
        assert [(await ask(own, tenant=tenant, **REQUESTS)).answer for _ in range(4)] == ["new"] * 3 + ["limited"]


async def test_requests_in_flight(own: Bus) -> None:
    """A tenant should have so many live requests and no more, queued or running, until one ends."""
    limits = TenantLimits(max_in_flight=2)
    ids = [(await ask(own, tenant_limits=limits)).request_id for _ in range(2)]
    refused = await ask(own, tenant_limits=limits)
    assert (refused.answer, refused.reason, refused.wait_s) == ("limited", RefusalReason.TENANT_IN_FLIGHT, 0.0)
    assert (await ask(own, tenant_limits=limits, tenant="other")).answer == "new"
    await own.end(ids[0], "cancelled")
    assert (await ask(own, tenant_limits=limits)).answer == "new"
    assert (await ask(own, tenant_limits=limits)).answer == "limited"


async def test_the_cells_clock_never_runs_backwards(own: Bus, clock: Clock) -> None:
    """A repeated call, another leader's clock and a clock that was set back should each add nothing."""
    for _ in range(3):
        await ask(own, **REQUESTS)
    await clock.tick(5_000)
    for _ in range(3):
        await clock.tick(0)
    assert (await ask(own, **REQUESTS)).wait_s == 15.0
    await own.take_lead("new", await own.read_leader())
    await own.raise_lead("new", 10**12)
    assert (await ask(own, **REQUESTS)).wait_s == 15.0
    await own.raise_lead("new", 10**6)
    assert (await ask(own, **REQUESTS)).wait_s == 15.0
    await own.raise_lead("new", 10**6 + 4_000)
    assert (await ask(own, **REQUESTS)).wait_s == 11.0
    await own.raise_lead("new")
    assert (await ask(own, **REQUESTS)).wait_s == 11.0


async def test_limits_hold_over_gateways_at_once(own: Bus, clock: Clock, open_limited: Callable[..., Bus]) -> None:
    """Of many submits through two buses at once exactly the limit's number should get through."""
    buses = (own, own if isinstance(own, MemoryBus) else open_limited(BusLimits()))
    for spec, count in ((REQUESTS, 3), ({"tenant_limits": TenantLimits(max_in_flight=5), "tenant": "x"}, 5)):
        outcomes = await asyncio.gather(*(ask(buses[i % 2], **spec) for i in range(20)))
        assert [outcome.answer for outcome in outcomes].count("new") == count


@pytest.mark.case(77)
@pytest.mark.parametrize("seed", range(4))
async def test_counters_equal_what_lives(cell: Cell, probe: Probe, seed: int) -> None:
    """After each of many random steps, lost and repeated ones too, the counters should be those of the records."""
    rng, ids, most = random.Random(seed), [await cell.submit(tenant="stays")], 0
    for _ in range(250):
        await _step(cell, rng, ids)
        records = [record for record in await cell.bus.load_records(sorted(await cell.bus.list_live())) if record]
        most = max(most, len(records))
        queued = [record.summary for record in records if record.state is RequestState.QUEUED]
        assert await cell.bus.read_queue() == QueueDepth(
            num_sequences=sum(summary.num_choices for summary in queued),
            num_tokens=sum(sum(summary.prompt_lens) for summary in queued),
        )
        if isinstance(probe, RedisProbe):
            flat = await probe.link.call("HGETALL", keys.IN_FLIGHT)
            tenants = [record.summary.tenant for record in records]
            expected = {tenant: tenants.count(tenant) for tenant in tenants}
            assert {k.decode(): int(v) for k, v in zip(flat[::2], flat[1::2], strict=True)} == expected
    ended = len(ids) - len(await cell.bus.list_live())
    assert most > 5
    assert ended > 5


async def _step(cell: Cell, rng: random.Random, ids: list[RequestId]) -> None:
    """Anything that anybody may do to a request, the first one excepted."""
    bus, worker, attempt, choice = cell.bus, rng.choice((W1, W2)), rng.randint(1, 3), rng.randint(0, 1)
    request_id = rng.choice(ids[1:] or ids)
    may_end = request_id != ids[0]
    match rng.randrange(9):
        case 0 | 1:
            spec = {"prompt_lens": (rng.randint(1, 9),) * rng.randint(1, 3), "n": rng.randint(1, 2)}
            ids.append(await cell.submit(**spec, tenant=rng.choice("ab")))
        case 2 | 3:
            await bus.dispatch(TOKEN, request_id, worker, 1)
        case 4:
            await bus.release(worker, request_id, attempt, is_preempted=bool(choice))
        case 5:
            await bus.requeue_one(TOKEN, request_id, worker, attempt)
        case 6 if rng.random() < 0.3:
            await bus.requeue(TOKEN, worker)
            await bus.hello(make_hello(worker))
        case 7 if may_end:
            record = await cell.record(request_id)
            if choice < len(record.choices):
                await cell.commit(request_id, record.choices[choice].num_entries, 5, reason=rng.choice(["", "stop"]),
                                  choice=choice, attempt=attempt)  # fmt: skip
        case 8 if may_end and choice:
            await bus.end(request_id, "cancelled")
        case 8 if may_end:
            await bus.stop_choice(request_id, 0, 0)
