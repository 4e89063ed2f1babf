"""Gateways: listeners that come and go, leases, subscriptions."""

from __future__ import annotations

from shared.bus import Subscribed
from shared.ids import RequestId
from shared.messages import TokenChunk
from tests.contract.cell import C1, C2, G1, G2, TOKEN, Cell, tokens


async def test_listeners_come_and_go(cell: Cell) -> None:
    """Attach and detach should each count once, however often they are called, and say how many are left."""
    request_id = await cell.submit()
    for _ in range(2):
        assert await cell.bus.attach(request_id, G2, C2)
    assert (await cell.record(request_id)).listeners == ((G1, C1), (G2, C2))
    for _ in range(2):
        assert await cell.bus.detach(request_id, G1, C1) == 1
    assert await cell.bus.detach(request_id, G2, C1) == 1
    for _ in range(2):
        assert await cell.bus.detach(request_id, G2, C2) == 0
    assert (await cell.record(request_id)).listeners == ()
    assert await cell.bus.attach(request_id, G1, C2)
    assert (await cell.record(request_id)).listeners == ((G1, C2),)


async def test_only_a_live_request_has_listeners(cell: Cell) -> None:
    """Attaching to an ended or unknown request should say no; its log is there to be read."""
    request_id = await cell.submit()
    await cell.bus.end(request_id, "cancelled")
    for name in (request_id, RequestId("cmpl-unknown")):
        assert not await cell.bus.attach(name, G1, C2)
        assert await cell.bus.detach(name, G1, C1) == 0
    assert await cell.bus.load_record(RequestId("cmpl-unknown")) is None


async def test_who_attached_gets_what_follows(cell: Cell) -> None:
    """A gateway that attached should receive the next commit, one that detached nothing more."""
    request_id = await cell.run()
    await cell.bus.attach(request_id, G2, C2)
    await cell.bus.detach(request_id, G1, C1)
    near, far = cell.bus.subscribe(G1), cell.bus.subscribe(G2)
    assert (await near.next(5), await far.next(5)) == (Subscribed(), Subscribed())
    await cell.commit(request_id, 0, 11)
    assert await far.next(5) == [TokenChunk(request_id=request_id, offset=0, data=tokens(0, 11)[0])]
    assert await near.next(0.05) is None
    await near.close()
    await far.close()


async def test_commits_without_listeners_are_logged(cell: Cell) -> None:
    """A request that nobody listens to should still be logged in full."""
    request_id = await cell.run(orphan_ttl_s=30)
    await cell.bus.detach(request_id, G1, C1)
    await cell.commit(request_id, 0, 11, reason="stop")
    assert len(await cell.log(request_id)) == 2


async def test_a_dead_gateway_leaves_orphans(cell: Cell) -> None:
    """Removing a gateway should drop its listeners and lease, and name the requests that nobody listens to; again
    too, for a leader that lost the reply."""
    orphan, shared_one, ended = await cell.submit(), await cell.submit(), await cell.submit()
    await cell.bus.attach(shared_one, G2, C2)
    await cell.bus.attach(orphan, G1, C2)
    await cell.bus.end(ended, "cancelled")
    await cell.bus.gateway_beat(G1)
    for _ in range(2):
        assert await cell.bus.remove_gateway(TOKEN, G1) == [orphan]
    assert (await cell.record(shared_one)).listeners == ((G2, C2),)
    assert await cell.bus.read_gateways() == {}


async def test_gateways_beat_until_they_leave(cell: Cell) -> None:
    """A gateway's counter should rise with each beat and go when it says bye."""
    await cell.bus.gateway_beat(G1)
    await cell.bus.gateway_beat(G1)
    await cell.bus.gateway_beat(G2)
    assert await cell.bus.read_gateways() == {G1: 2, G2: 1}
    for _ in range(2):
        await cell.bus.gateway_bye(G1)
    assert await cell.bus.read_gateways() == {G2: 1}
    await cell.bus.gateway_bye(G2)


async def test_silence_is_none(cell: Cell) -> None:
    """`next` should return None after its time and go on to work."""
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    assert await subscription.next(0.02) is None
    assert await subscription.next(0) is None
    request_id = await cell.run()
    await cell.bus.end(request_id, "cancelled")
    event = await subscription.next(5)
    assert isinstance(event, list)
    assert [message.request_id for message in event] == [request_id]
    await subscription.close()


async def test_a_closed_subscription_costs_nothing(cell: Cell) -> None:
    """Closing, also twice, should end the subscription; others of the same gateway go on."""
    first, second = cell.bus.subscribe(G1), cell.bus.subscribe(G1)
    assert (await first.next(5), await second.next(5)) == (Subscribed(), Subscribed())
    await first.close()
    await first.close()
    await cell.bus.end(await cell.submit(), "cancelled")
    assert isinstance(await second.next(5), list)
    await second.close()
