"""What the launcher decides before it starts anything."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from quire import launcher, services
from quire.worker_scaling import free_indexes
from shared.config import ProcessConfig, ScalingConfig, ServeConfig
from shared.errors import ConfigError
from shared.worker_wish import WorkerLimits


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_port_zero_gives_different_free_ports() -> None:
    """Port 0 should give as many different ports as there are gateways, free right after."""
    ports = launcher.choose_ports("127.0.0.1", 0, 3)
    assert len(set(ports)) == 3
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_ports_count_up_from_the_first() -> None:
    """Gateway i should get port + i."""
    first = launcher.choose_ports("127.0.0.1", 0, 1)[0]
    assert launcher.choose_ports("127.0.0.1", first, 1) == [first]


def test_taken_port_is_refused(taken_port: int) -> None:
    """A port that somebody listens on should be refused by number."""
    with pytest.raises(ConfigError, match=f"--port={taken_port}: in use by another program; choose"):
        launcher.choose_ports("127.0.0.1", taken_port, 1)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a" * 70 + ".invalid"])
def test_foreign_host_is_refused(host: str) -> None:
    """An address that is none of this machine's should be refused by name."""
    with pytest.raises(ConfigError, match="--host"):
        launcher.choose_ports(host, 0, 1)


def test_ports_beyond_the_last_are_refused() -> None:
    """More gateways than there are ports left should be refused."""
    with pytest.raises(ConfigError, match="65535"):
        launcher.choose_ports("127.0.0.1", 65535, 2)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@10.0.0.1:6379/0", "redis://10.0.0.1:6379/0"),
        ("redis://u:p@ss@h:1", "redis://h:1"),
        ("unix:///tmp/r.sock", "unix:///tmp/r.sock"),
    ],
)
def test_password_is_not_shown(url: str, shown: str) -> None:
    """The ready line should name the Redis without its password."""
    assert launcher.without_password(url) == shown


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_url_can_be_reached(host: str, url: str) -> None:
    """The address shown should be one to connect to, also when listening on all."""
    assert launcher.reachable_url(host, 80) == url


@pytest.mark.parametrize(("redis_url", "worker_s"), [("", launcher.NO_DRAIN_S), ("redis://localhost", 12.0)])
def test_workers_drain_only_for_clients_that_can_come_back(redis_url: str, worker_s: float) -> None:
    """Gateways stop first, with time for their streams; workers behind a private Redis then work for nobody."""
    config = ServeConfig(process=ProcessConfig(redis_url=redis_url, drain_s=7.0))
    order = launcher.stop_order(["redis", "scheduler", "worker0", "worker1", "gateway0"], config)
    assert order == [(["gateway0"], 12.0), (["worker0", "worker1"], worker_s), (["scheduler"], 5.0), (["redis"], 5.0)]


def test_metrics_on_a_gateways_port_are_refused() -> None:
    """Scheduler and workers count up from --metrics-port; they should not meet the gateways there."""
    config = ServeConfig(process=ProcessConfig(metrics_port=9000), workers=2)
    launcher.refuse_shared_ports(config, [8999, 9003])
    with pytest.raises(ConfigError, match=r"--metrics-port=9000.* 9000 to 9002.* 9002"):
        launcher.refuse_shared_ports(config, [9002, 9003])
    launcher.refuse_shared_ports(ServeConfig(), [8000])
    scaled = ServeConfig(process=ProcessConfig(metrics_port=9000), scaling=ScalingConfig(autoscale="1:4"))
    with pytest.raises(ConfigError, match=r"9000 to 9004"):
        launcher.refuse_shared_ports(scaled, [9004])


def test_workers_and_autoscale_do_not_go_together() -> None:
    """A number and a range of workers should be refused together, and a range beyond what one machine runs."""
    scaling = ScalingConfig(autoscale="1:3")
    assert launcher.scaling_limits(ServeConfig(scaling=scaling)) == WorkerLimits(low=1, high=3)
    assert launcher.scaling_limits(ServeConfig(workers=3)) is None
    with pytest.raises(ConfigError, match=r"--workers=2 together with --autoscale=1:3: .* leave --workers out"):
        launcher.scaling_limits(ServeConfig(workers=2, scaling=scaling))
    with pytest.raises(ConfigError, match="--autoscale=1:65: at most 64 workers"):
        launcher.scaling_limits(ServeConfig(scaling=ScalingConfig(autoscale="1:65")))


def test_the_scheduler_is_told_and_workers_share_the_cores() -> None:
    """`--autoscale` and its patience should reach the scheduler, and each worker get its share of the most there may
    be."""
    scaling = ScalingConfig(autoscale="1:64", autoscale_grow_after_s=0.5)
    config = ServeConfig(scaling=scaling)
    argv = services.scheduler_spec(config, "redis://h").argv
    assert {"--autoscale=1:64", "--autoscale-grow-after-s=0.5"} <= set(argv)
    assert "--num-threads=1" in services.worker_spec(config, "redis://h", 0).argv


def test_a_worker_that_leaves_keeps_its_place_until_it_has_gone() -> None:
    """New workers should take numbers that no process has, below the most workers there may be."""
    limits = WorkerLimits(low=1, high=3)
    assert free_indexes(["redis", "worker-1", "gateway-0"], limits) == [0, 2]
    assert free_indexes(["worker-0", "worker-1", "worker-2"], limits) == []
