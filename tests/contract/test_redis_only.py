"""What only a real Redis can show: restarts, lost groups and scripts, refused writes, broken connections."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.embedded_redis import EmbeddedRedis
from shared import keys, redis_subscription
from shared.bus import Bus, BusLimits, ChannelMessage, RequestState, Subscribed, Subscription
from shared.errors import BusError, BusRefused, BusUnavailable, ConfigError
from shared.log import TokenEntry
from shared.messages import RequestEnded, TokenChunk
from tests.conftest import find_leaks
from tests.contract.cell import G1, TOKEN, W1, Cell, RequestSpec, make_hello, make_item, make_request
from tests.waiting import wait_until_async

pytest.importorskip("redis", reason="the redis package is not installed here")

from shared.redis_bus import open_bus
from shared.redis_connection import connect, connection_maker
from shared.redis_link import RedisLink


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """A server that the test may kill, stop and configure."""
    folder = Path(tempfile.mkdtemp(prefix="qr-", dir="/tmp"))
    server = EmbeddedRedis(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def own_cell(own_server: EmbeddedRedis) -> AsyncIterator[Cell]:
    bus = open_bus(own_server.url, BusLimits())
    yield await Cell.start(bus)
    await bus.close()


@pytest.fixture
async def link(own_server: EmbeddedRedis) -> AsyncIterator[RedisLink]:
    one = RedisLink(own_server.url)
    yield one
    await one.close()


async def test_a_cancellation_is_never_lost(link: RedisLink) -> None:
    """A task that is cancelled at any moment of a command should end."""

    async def ask_for_ever() -> None:
        while True:
            await link.call("PING")

    for turn in range(300):
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turn % 40):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait({task}, timeout=5)
        assert not running, f"not ended after {turn % 40} turns of the loop"


async def test_many_reads_at_once_get_their_own_replies(link: RedisLink) -> None:
    """Blocking reads that run side by side, again and again, should each get their own reply and never be cut off."""

    async def read_often(name: str) -> None:
        for number in range(100):
            text = f"{name}.{number}"
            assert await link.wait("ECHO", text) == text.encode()

    await asyncio.gather(*(read_often(str(i)) for i in range(8)))


async def test_a_cancelled_caller_does_not_shift_replies(link: RedisLink) -> None:
    """The reply to a command whose caller has gone should be dropped, not given to the next one."""
    await link.call("PING")
    for number in range(50):
        leaving = asyncio.create_task(link.call("ECHO", "for nobody"))
        staying = asyncio.create_task(link.call("ECHO", str(number)))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == str(number).encode()
        assert leaving.cancelled() or await leaving == b"for nobody"


async def test_what_a_dropped_connection_had_not_sent_stays_unsent(own_server: EmbeddedRedis, link: RedisLink) -> None:
    """Commands asked in the turn in which their connection is dropped should fail, and not take effect."""
    connection = await connect(connection_maker(own_server.url), timeout_s=5, patience_s=5)
    asked = connection.ask(("SET", "stranger", 1))
    connection.close("nobody needs it")
    with pytest.raises(ConnectionError, match="nobody needs it"):
        await asked

    async def is_alone() -> bool:
        return len((await link.call("CLIENT", "LIST")).splitlines()) == 1

    await wait_until_async(is_alone, description="the connection is closed")
    assert await link.call("EXISTS", "stranger") == 0


async def _reset_at_the_first_ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while b"PING" not in (data := await reader.read(4096)):
        writer.write(b"+OK\r\n" * data.count(b"SETINFO"))
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_a_reset_fails_every_command() -> None:
    """Whatever is asked around the moment in which the peer resets the connection should fail as lost, nothing else."""
    complaints: list[dict[str, object]] = []

    async def ask_on(num_turns: int) -> list[object]:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        async with await asyncio.start_server(_reset_at_the_first_ping, "127.0.0.1", 0) as server:
            make = connection_maker(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            connection = await connect(make, timeout_s=5, patience_s=5)
            asked = []
            while connection.is_open:
                asked.append(connection.ask(("PING",)))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
            return await asyncio.gather(*asked, return_exceptions=True)

    for num_turns in (1, 2, 3, 4) * 5:
        outcomes = uvloop.run(ask_on(num_turns))
        assert {ConnectionError} == {type(outcome) for outcome in outcomes}
    gc.collect()
    assert complaints == []


async def _answer_as_redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """ECHO is answered, QUIT obeyed, anything else is OK."""
    import hiredis

    parser = hiredis.Reader()
    while data := await reader.read(65536):
        parser.feed(data)
        while command := parser.gets():
            if command[0] == b"QUIT":
                writer.close()
                return
            writer.write(b"$%d\r\n%b\r\n" % (len(command[1]), command[1]) if command[0] == b"ECHO" else b"+OK\r\n")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with key and certificate of a server at localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    subprocess.run([*command, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_connection_may_be_encrypted(run: Callable[[Coroutine[Any, Any, None]], None], certificate: Path) -> None:
    """Behind `rediss://`, commands side by side, large ones too, should get their replies, also after a lost one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def talk() -> None:
        async with await asyncio.start_server(_answer_as_redis, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            link = RedisLink(f"rediss://:secret@localhost:{port}/2?ssl_ca_certs={certificate}")
            texts = [str(number) * 100_000 for number in range(10)]
            for _ in range(2):
                answers = await asyncio.gather(*(link.call("ECHO", text) for text in texts))
                assert [text.encode() for text in texts] == answers
                with pytest.raises(BusUnavailable):
                    await link.call("QUIT")
            await link.close()

    run(talk())


async def test_an_address_names_a_database(own_server: EmbeddedRedis, link: RedisLink) -> None:
    """What is written by way of an address with `db` should be in that database only; one that is not there refused."""
    other = RedisLink(f"{own_server.url}?db=3")
    await other.call("SET", "k", "v")
    assert (await other.call("GET", "k"), await link.call("GET", "k")) == (b"v", None)
    await other.close()
    nowhere = RedisLink(f"{own_server.url}?db=99")
    with pytest.raises(BusUnavailable, match="out of range"):
        await nowhere.call("PING")
    await nowhere.close()


async def _subscribed(bus: Bus) -> Subscription:
    subscription = bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    return subscription


async def _next_event(subscription: Subscription) -> object:
    """The next event that is not silence."""
    async with asyncio.timeout(20):
        while True:
            event = await subscription.next(0.5)
            if event is not None:
                return event


async def _answers(bus: Bus) -> bool:
    try:
        await bus.ping()
    except BusUnavailable:
        return False
    return True


async def test_all_survives_a_crash(own_cell: Cell, own_server: EmbeddedRedis) -> None:
    """What was answered should be there after kill -9 and a restart: records, log, wake-ups, lead."""
    running, queued = await own_cell.run(), await own_cell.submit()
    await own_cell.commit(running, 0, 11, 12)
    before = await own_cell.bus.load_records([running, queued])
    own_server.kill()
    own_server.start()
    await wait_until_async(lambda: _answers(own_cell.bus), description="the restarted Redis answers")
    assert await own_cell.bus.load_records([running, queued]) == before
    assert await own_cell.log(running) == [TokenEntry(0, 11), TokenEntry(0, 12)]
    assert len(await own_cell.bus.read_submits("a", 9, 0)) == 2
    assert (await own_cell.commit(running, 2, 13)).length == 3
    assert (await own_cell.bus.read_leader()).token == TOKEN


@pytest.mark.case(89)
async def test_a_subscription_survives_a_crash(own_cell: Cell, own_server: EmbeddedRedis) -> None:
    """After a restart the subscription should confirm itself anew and deliver, without anyone doing anything."""
    request_id = await own_cell.run()
    subscription = await _subscribed(own_cell.bus)
    own_server.kill()
    assert await subscription.next(0.3) is None
    own_server.start()
    assert await _next_event(subscription) == Subscribed()
    await wait_until_async(lambda: _answers(own_cell.bus), description="the restarted Redis answers")
    await own_cell.bus.end(request_id, "cancelled")
    assert await _next_event(subscription) == [RequestEnded(request_id=request_id, reason="cancelled", prompt_tokens=3)]
    await subscription.close()


async def test_a_cut_connection_is_made_again(own_cell: Cell, link: RedisLink) -> None:
    """A subscription whose connection the server drops (a full output buffer does that) should come back."""
    subscription = await _subscribed(own_cell.bus)
    await link.call("CLIENT", "KILL", "TYPE", "pubsub")
    assert await _next_event(subscription) == Subscribed()
    await subscription.close()


async def test_a_dead_path_is_noticed(
    own_cell: Cell, own_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that shows no error but answers nothing should be given up and made again."""
    monkeypatch.setattr(redis_subscription, "PING_AFTER_S", 0.1)
    subscription = await _subscribed(own_cell.bus)
    assert await subscription.next(0.5) is None
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        assert await subscription.next(0.6) is None
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert await _next_event(subscription) == Subscribed()
    await subscription.close()


async def test_a_subscription_waits_for_a_server(own_server: EmbeddedRedis) -> None:
    """Subscribing while Redis is down should neither fail nor spin, and work when it comes."""
    own_server.stop()
    bus = open_bus(own_server.url, BusLimits())
    subscription = bus.subscribe(G1)
    assert await subscription.next(0.3) is None
    own_server.start()
    assert await _next_event(subscription) == Subscribed()
    await subscription.close()
    await bus.close()


async def test_a_bad_publication_is_buried(own_cell: Cell, link: RedisLink) -> None:
    """What cannot be read should be kept in `dead`; what follows should arrive."""
    request_id = await own_cell.run()
    subscription = await _subscribed(own_cell.bus)
    for data in (b"\xc1", b"\x80", b"\x91\x80", b"\x91" * 5000):
        await link.call("PUBLISH", keys.token_channel(G1), data)
    await own_cell.bus.end(request_id, "cancelled")
    event = await _next_event(subscription)
    assert isinstance(event, list)
    assert await link.call("XLEN", keys.DEAD) == 4
    await subscription.close()


async def test_publications_may_be_delivered_by_a_call(own_cell: Cell, link: RedisLink) -> None:
    """While `next` waits each publication should go to `deliver`, in order and once; what nobody can read to `dead`."""
    request_id = await own_cell.run()
    subscription = await _subscribed(own_cell.bus)
    delivered: list[ChannelMessage] = []
    subscription.deliver = delivered.extend
    waiting = asyncio.create_task(subscription.next(1.0))
    await asyncio.sleep(0)
    for token_id in (11, 12):
        await own_cell.commit(request_id, token_id - 11, token_id)
    await own_cell.bus.end(request_id, "cancelled")
    await link.call("PUBLISH", keys.token_channel(G1), b"\xc1")
    assert await waiting is None
    first, second, ended = delivered
    assert isinstance(first, TokenChunk)
    assert isinstance(second, TokenChunk)
    assert (first.offset, second.offset) == (0, len(first.data))
    assert isinstance(ended, RequestEnded)
    assert await link.call("XLEN", keys.DEAD) == 1
    await subscription.close()


async def test_a_lost_group_comes_back(own_cell: Cell, link: RedisLink) -> None:
    """A reader whose group is gone should make it again and read from the start: at least once, never not at all."""
    first = await own_cell.submit()
    await own_cell.bus.read_submits("a", 9, 0)
    await link.call("XGROUP", "DESTROY", keys.SUBMIT, keys.SUBMIT_GROUP)
    assert await own_cell.bus.claim_submits("a", 0, 9) == []
    await link.call("XGROUP", "DESTROY", keys.SUBMIT, keys.SUBMIT_GROUP)
    assert [summary.request_id for _, summary in await own_cell.bus.read_submits("a", 9, 0)] == [first]


async def test_a_group_lost_while_waiting_comes_back(own_cell: Cell, link: RedisLink) -> None:
    """A blocked reader should live through the loss of everything."""
    waiting = asyncio.create_task(own_cell.bus.read_submits("a", 9, 2_000))
    await wait_until_async(lambda: link.call("EXISTS", keys.SUBMIT), description="the group is made")
    await link.call("FLUSHALL")
    request_id = await own_cell.submit()
    found = await waiting or await own_cell.bus.read_submits("a", 9, 2_000)
    assert [summary.request_id for _, summary in found] == [request_id]


async def test_lost_scripts_come_back(own_cell: Cell, link: RedisLink) -> None:
    """A server that forgot its scripts should be given them again, each at its next use."""
    request_id = await own_cell.run()
    await link.call("SCRIPT", "FLUSH")
    assert (await own_cell.commit(request_id, 0, 11)).length == 1
    await link.call("SCRIPT", "FLUSH")
    assert await own_cell.bus.end(request_id, "cancelled")


async def test_an_absent_server_is_unavailable(own_cell: Cell, own_server: EmbeddedRedis) -> None:
    """While Redis is down, commands, scripts and blocking reads should say so; afterwards they should work."""
    request = make_request(RequestSpec())
    own_server.kill()
    for step in (own_cell.bus.ping(), own_cell.bus.submit(request), own_cell.bus.read_submits("a", 1, 50)):
        with pytest.raises(BusUnavailable):
            await step
    own_server.start()
    await wait_until_async(lambda: _answers(own_cell.bus), description="the restarted Redis answers")
    assert (await own_cell.bus.submit(request)).answer == "new"


async def test_a_failover_replica_is_unavailable(own_cell: Cell, link: RedisLink) -> None:
    """A server that became a replica takes no writes; that should look like no server."""
    request_id = await own_cell.run()
    await link.call("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BusUnavailable):
        await own_cell.commit(request_id, 0, 11)
    await link.call("REPLICAOF", "NO", "ONE")
    assert (await own_cell.commit(request_id, 0, 11)).length == 1


async def test_a_busy_server_is_unavailable(own_cell: Cell, link: RedisLink) -> None:
    """A server stuck in a script should be unavailable, not an unknown error."""
    await link.call("CONFIG", "SET", "lua-time-limit", "10")
    stuck = asyncio.create_task(link.call("EVAL", "while true do end", 0))

    async def is_refused() -> bool:
        try:
            await own_cell.bus.ping()
        except BusUnavailable as error:
            return "BUSY" in str(error)
        return False

    await wait_until_async(is_refused, description="Redis says that it is busy")
    await link.call("SCRIPT", "KILL")
    with pytest.raises(Exception, match="killed"):
        await stuck
    await own_cell.bus.ping()


async def test_refused_writes_are_refused_whole(own_cell: Cell, link: RedisLink) -> None:
    """A Redis that takes no writes should give `BusRefused` and have done nothing; later the same call goes through."""
    request_id = await own_cell.run()
    await link.call("CONFIG", "SET", "min-replicas-to-write", "1")
    with pytest.raises(BusRefused):
        await own_cell.commit(request_id, 0, 11)
    with pytest.raises(BusRefused):
        await own_cell.bus.submit(make_request(RequestSpec()))
    await link.call("CONFIG", "SET", "min-replicas-to-write", "0")
    assert await own_cell.log(request_id) == []
    assert (await own_cell.commit(request_id, 0, 11)).length == 1


async def test_full_memory_refuses_growth_and_lets_work_end(own_cell: Cell, link: RedisLink) -> None:
    """At maxmemory nothing new should be stored, in part neither, while leases go on and requests can end."""
    ids = [await own_cell.run() for _ in range(2)]
    waiting = await own_cell.submit()
    await own_cell.bus.gateway_beat(G1)
    await link.call("CONFIG", "SET", "maxmemory", "1mb")
    for step in (own_cell.commit(ids[0], 0, 11), own_cell.bus.dispatch(TOKEN, waiting, W1, 1)):
        with pytest.raises(BusRefused):
            await step
    assert (await own_cell.record(ids[0])).choices[0].num_entries == 0
    assert (await own_cell.record(waiting)).state is RequestState.QUEUED
    await own_cell.bus.raise_lead(TOKEN)
    await own_cell.bus.gateway_beat(G1)
    assert await own_cell.bus.beat(W1, 1, [(ids[0], 1)]) == ["ok"]
    assert await own_cell.bus.release(W1, ids[0], 1, is_preempted=True)
    assert await own_cell.bus.requeue(TOKEN, W1) == [ids[1]]
    for request_id in (*ids, waiting):
        assert await own_cell.bus.end(request_id, "deadline", "deadline", "no memory")
    assert await find_leaks(link) == []
    await link.call("CONFIG", "SET", "maxmemory", "0")


async def test_new_work_is_refused_before_memory_is_full(own_server: EmbeddedRedis, link: RedisLink) -> None:
    """Above `max_memory_fraction` of maxmemory a submit should be answered `full`, naming memory."""
    await link.call("CONFIG", "SET", "maxmemory", "1gb")
    for fraction, answer in ((1.0, "new"), (0.000001, "full")):
        bus = open_bus(own_server.url, BusLimits(max_memory_fraction=fraction))
        outcome = await bus.submit(make_request(RequestSpec()))
        assert (outcome.answer, "memory" in outcome.detail) == (answer, answer == "full")
        await bus.close()


async def test_an_unreadable_record_ends(own_cell: Cell, link: RedisLink) -> None:
    """A record that nobody can read should be buried once and its request ended, not stop those who load it."""
    broken, good = await own_cell.submit(), await own_cell.submit()
    await link.call("HSET", keys.record(broken), "summary", b"\xc1")
    for _ in range(2):
        records = await own_cell.bus.load_records([broken, good])
        assert [record and record.summary.request_id for record in records] == [None, good]
    assert await own_cell.bus.list_live() == {good}
    await link.call("HSET", keys.record(good), "body", b"\xc1")
    assert await own_cell.bus.load_body(good) is None
    assert await own_cell.bus.list_live() == set()
    assert await link.call("XLEN", keys.DEAD) == 2


async def test_an_unreadable_hello_is_removed(own_cell: Cell, link: RedisLink) -> None:
    """A worker card that nobody can read should be buried once and not hide the others."""
    await link.call("HSET", keys.WORKERS, "hello:bad:1", b"\xc1")
    for _ in range(2):
        assert len(await own_cell.bus.read_workers()) == 2
    assert await link.call("XLEN", keys.DEAD) == 1


async def test_an_index_without_record_can_be_cleared(own_cell: Cell, link: RedisLink) -> None:
    """An id in `live` whose record vanished should leave by an end, which nobody wins."""
    request_id = await own_cell.submit()
    await link.call("DEL", keys.record(request_id))
    assert not await own_cell.bus.end(request_id, "failed")
    assert await own_cell.bus.list_live() == set()


async def test_two_buses_race_for_one_request(own_server: EmbeddedRedis) -> None:
    """Two processes' worth of dispatches, commits and ends at once should leave one attempt, one log and one end."""
    buses = [open_bus(own_server.url, BusLimits()) for _ in range(2)]
    cell = await Cell.start(buses[0])
    for _ in range(10):
        request_id = await cell.submit()
        outcomes = await asyncio.gather(*(bus.dispatch(TOKEN, request_id, W1, 1) for bus in buses * 3))
        assert [outcome.answer for outcome in outcomes].count("ok") == 1
        await asyncio.gather(*(bus.commit(W1, [make_item(request_id, 0, 11)]) for bus in buses * 3))
        assert await cell.log(request_id) == [TokenEntry(0, 11)]
        assert sum(await asyncio.gather(*(bus.end(request_id, "cancelled") for bus in buses * 3))) == 1
    for bus in buses:
        await bus.close()


async def test_closing_frees_all_connections(own_server: EmbeddedRedis, link: RedisLink) -> None:
    """A closed bus should hold no connection."""
    bus = open_bus(own_server.url, BusLimits())
    await asyncio.gather(*(bus.ping() for _ in range(5)), bus.read_submits("a", 1, 10))
    await bus.close()

    async def is_alone() -> bool:
        return len((await link.call("CLIENT", "LIST")).splitlines()) == 1

    await wait_until_async(is_alone, description="only the test's own connection is left")


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port"])
def test_a_bad_url_is_a_config_error(url: str) -> None:
    """A wrong URL should be told at the start, by its setting's name."""
    with pytest.raises(ConfigError, match="--redis-url"):
        open_bus(url, BusLimits())


async def test_a_wrong_password_is_unavailable(own_cell: Cell, own_server: EmbeddedRedis, link: RedisLink) -> None:
    """New connections without the right password should fail as a bus error that names the reason."""
    await link.call("CONFIG", "SET", "requirepass", "secret")
    stranger = open_bus(own_server.url, BusLimits())
    with pytest.raises(BusError, match=r"(?i)auth"):
        await stranger.ping()
    await stranger.close()
    friend = open_bus(f"unix://:secret@{own_server.socket_path}", BusLimits())
    await friend.ping()
    await friend.close()


async def test_the_leak_check_finds_leaks(redis_server: EmbeddedRedis, redis_bus: Bus) -> None:
    """The fixture that guards all tests should see each kind of leak."""
    link = RedisLink(redis_server.url)
    await link.call("SET", "stranger", 1)
    await link.call("HSET", "req:cmpl-dead", "state", "ended")
    await link.call("XADD", "inbox:gone:1", "*", "d", "x")
    await link.call("SADD", keys.LIVE, "cmpl-live")
    leaks = await find_leaks(link)
    assert [leak.split()[0] for leak in leaks] == ["live", "inbox:gone:1", "req:cmpl-dead", "stranger"]
    await link.call("FLUSHALL")
    await redis_bus.hello(make_hello(W1))
    assert await find_leaks(link) == []
    await link.close()
