"""Workers: leases, what they hold, giving back, commands and devices."""

from __future__ import annotations

from shared import keys
from shared.bus import RequestState, WorkerPulse
from shared.ids import RequestId, WorkerId
from tests.contract.cell import TOKEN, W1, W2, Cell, Probe, make_hello


async def test_a_hello_shows_the_worker(cell: Cell) -> None:
    """A worker should be seen with its card as soon as it said hello; a second hello should not reset its beat."""
    await cell.bus.beat(W1, 5, [])
    await cell.bus.hello(make_hello(W1))
    pulses = {pulse.hello.worker_id: pulse for pulse in await cell.bus.read_workers()}
    assert pulses[W1] == WorkerPulse(hello=make_hello(W1), beat=1, num_steps=5, has_work=False)
    assert pulses[W2].beat == 0


async def test_a_new_hello_ends_the_old_one(cell: Cell, probe: Probe) -> None:
    """A restarted worker should leave nothing of its earlier start: work queued, crash counted, device free."""
    suspect, other = await cell.run(), await cell.run()
    await cell.bus.mark_suspect(W1, suspect)
    await cell.bus.claim_device(W1, ["gpu0"])
    again, longer, deeper = WorkerId("w1:zz"), WorkerId("w11:aa"), WorkerId("w1:aa:zz")
    for worker_id in (longer, deeper, again, again):
        await cell.bus.hello(make_hello(worker_id))
    left = {pulse.hello.worker_id for pulse in await cell.bus.read_workers()}
    assert left == {again, W2, longer, deeper}
    records = [await cell.record(request_id) for request_id in (suspect, other)]
    assert [(r.state, r.owner, r.attempt) for r in records] == [(RequestState.QUEUED, None, 1)] * 2
    assert [r.crashes for r in records] == [1, 0]
    assert await probe.stream_length(keys.inbox(W1)) == 0
    assert await cell.bus.claim_device(W2, ["gpu0"]) == "gpu0"
    assert (await cell.commit(suspect, 0, 7)).answer == "lost"
    assert await cell.bus.beat(W1, 1, [(suspect, 1)]) == ["lost"]


async def test_a_beat_raises_the_lease_and_shows_work(cell: Cell) -> None:
    """Each beat should move the counter, and tell steps and whether anything is held."""
    request_id = await cell.run()
    assert await cell.bus.beat(W1, 7, [(request_id, 1)]) == ["ok"]
    pulses = {pulse.hello.worker_id: pulse for pulse in await cell.bus.read_workers()}
    assert (pulses[W1].beat, pulses[W1].num_steps, pulses[W1].has_work) == (1, 7, True)
    await cell.bus.beat(W1, 8, [])
    pulses = {pulse.hello.worker_id: pulse for pulse in await cell.bus.read_workers()}
    assert (pulses[W1].beat, pulses[W1].num_steps, pulses[W1].has_work) == (2, 8, False)


async def test_a_beat_answers_for_each_held_request(cell: Cell) -> None:
    """ok, stop or lost should come in the order asked, for every attempt that a worker believes to hold."""
    held, ended, other, old = [await cell.run() for _ in range(4)]
    await cell.bus.end(ended, "cancelled")
    await cell.bus.requeue_one(TOKEN, other, W1, 1)
    await cell.dispatch(other, W2)
    await cell.bus.requeue_one(TOKEN, old, W1, 1)
    await cell.dispatch(old, W1)
    asked = [(held, 1), (ended, 1), (other, 1), (old, 1), (old, 2), (RequestId("cmpl-none"), 1)]
    assert await cell.bus.beat(W1, 1, asked) == ["ok", "stop", "lost", "lost", "ok", "lost"]


async def test_a_removed_worker_has_lost_everything(cell: Cell) -> None:
    """A worker whose fields were removed should hear lost for all it holds, and not reappear by beating."""
    request_id = await cell.run()
    await cell.bus.requeue(TOKEN, W1)
    assert await cell.bus.beat(W1, 9, [(request_id, 1)]) == ["lost"]
    assert [pulse.hello.worker_id for pulse in await cell.bus.read_workers()] == [W2]


async def test_a_worker_without_fields_holds_nothing(cell: Cell) -> None:
    """Even what its records still say is its own, or has ended, should be lost for a worker that left."""
    running, ended = await cell.run(), await cell.run()
    await cell.bus.end(ended, "cancelled")
    await cell.bus.bye(W1)
    assert await cell.bus.beat(W1, 1, [(running, 1), (ended, 1)]) == ["lost", "lost"]


async def test_release_gives_a_request_back(cell: Cell) -> None:
    """A released request should be queued at its old place, its attempt unchanged; only a preemption is counted."""
    request_id = await cell.run()
    order = (await cell.record(request_id)).order
    assert await cell.bus.release(W1, request_id, 1, is_preempted=True)
    record = await cell.record(request_id)
    assert (record.state, record.owner, record.attempt, record.order) == (RequestState.QUEUED, None, 1, order)
    assert record.preemptions == 1
    await cell.dispatch(request_id)
    assert await cell.bus.release(W1, request_id, 2, is_preempted=False)
    assert (await cell.record(request_id)).preemptions == 1


async def test_release_twice_is_once(cell: Cell) -> None:
    """A repeated release, or one by a worker or attempt that does not hold it, should change nothing."""
    request_id = await cell.run()
    assert not await cell.bus.release(W2, request_id, 1, is_preempted=True)
    assert not await cell.bus.release(W1, request_id, 2, is_preempted=True)
    assert await cell.bus.release(W1, request_id, 1, is_preempted=True)
    assert not await cell.bus.release(W1, request_id, 1, is_preempted=True)
    assert (await cell.record(request_id)).preemptions == 1


async def test_a_released_request_goes_on_where_it_was(cell: Cell) -> None:
    """The log should stay through a release, and the next attempt append behind it."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12)
    await cell.bus.release(W1, request_id, 1, is_preempted=True)
    await cell.dispatch(request_id)
    assert (await cell.commit(request_id, 2, 13, attempt=2)).length == 3
    assert len(await cell.log(request_id)) == 3


async def test_an_inbox_is_read_from_any_place(cell: Cell, probe: Probe) -> None:
    """Entries should come in order, after the id asked for, until they are acked."""
    ids = [await cell.run() for _ in range(3)]
    entries = await cell.bus.read_inbox(W1, "0-0", 9, 0)
    assert [message.request_id for _, message in entries] == ids
    assert await cell.bus.read_inbox(W1, entries[1][0], 9, 0) == entries[2:]
    assert await cell.bus.read_inbox(W1, "0-0", 2, 0) == entries[:2]
    for _ in range(2):
        await cell.bus.ack_inbox(W1, [entry_id for entry_id, _ in entries[:2]])
    await cell.bus.ack_inbox(W1, [])
    assert await cell.bus.read_inbox(W1, "0-0", 9, 0) == entries[2:]
    assert await probe.stream_length(keys.inbox(W1)) == 1


async def test_bye_removes_the_worker(cell: Cell, probe: Probe) -> None:
    """A clean leave should take fields, inbox and device claims, also when called twice."""
    await cell.run()
    await cell.bus.claim_device(W1, ["gpu0"])
    for _ in range(2):
        await cell.bus.bye(W1)
    assert [pulse.hello.worker_id for pulse in await cell.bus.read_workers()] == [W2]
    assert await probe.stream_length(keys.inbox(W1)) == 0
    assert await cell.bus.claim_device(W2, ["gpu0"]) == "gpu0"


async def test_a_device_has_one_holder(cell: Cell) -> None:
    """Each worker should get a device of its own, the same again when it asks again, none when all are taken."""
    assert await cell.bus.claim_device(W1, ["gpu0", "gpu1"]) == "gpu0"
    assert await cell.bus.claim_device(W1, ["gpu0", "gpu1"]) == "gpu0"
    assert await cell.bus.claim_device(W2, ["gpu0", "gpu1"]) == "gpu1"
    assert await cell.bus.claim_device(WorkerId("w3:cc"), ["gpu0", "gpu1"]) is None
    assert await cell.bus.claim_device(WorkerId("w3:cc"), []) is None


async def test_a_lost_workers_device_is_free(cell: Cell) -> None:
    """A requeue should free the device for the next worker."""
    await cell.bus.claim_device(W1, ["gpu0"])
    await cell.bus.requeue(TOKEN, W1)
    assert await cell.bus.claim_device(W2, ["gpu0"]) == "gpu0"


async def test_a_claim_of_a_start_that_failed_is_free_to_the_next(cell: Cell) -> None:
    """A worker that died before its hello should not keep a device from its own next start, but from all others."""
    first, second, stranger = WorkerId("w9:aa"), WorkerId("w9:bb"), WorkerId("w9:x:aa")
    assert await cell.bus.claim_device(first, ["gpu0"]) == "gpu0"
    assert await cell.bus.claim_device(stranger, ["gpu0"]) is None
    assert await cell.bus.claim_device(second, ["gpu0"]) == "gpu0"
    await cell.bus.hello(make_hello(second))
    assert await cell.bus.claim_device(first, ["gpu0"]) is None
    await cell.bus.bye(second)


async def test_all_names_of_prefixes_have_one_key(cell: Cell) -> None:
    """Whoever asks for the key of prefixes should get the one that was drawn first."""
    first = await cell.bus.prefix_key()
    assert await cell.bus.prefix_key() == first
    assert len(first) == 32
