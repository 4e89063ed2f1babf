"""What `--redis-url` may say: whatever redis-py understands, and a clear refusal of everything else."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from shared.errors import ConfigError

pytest.importorskip("redis", reason="the redis package is not installed here")

from shared.redis_connection import connection_maker


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1", {"host": "127.0.0.1", "port": 6379, "db": 0, "password": None}),
        ("redis://:p%40ss@10.0.0.1:6380/2", {"host": "10.0.0.1", "port": 6380, "db": 2, "password": "p@ss"}),
        ("redis://me:pass@redis", {"host": "redis", "username": "me", "password": "pass"}),
        ("unix:///run/a%20b.sock?db=3", {"path": "/run/a b.sock", "db": 3}),
        ("rediss://host?ssl_ca_certs=/ca.pem", {"ca_certs": "/ca.pem", "cert_reqs": ssl.CERT_REQUIRED}),
        ("rediss://host?ssl_cert_reqs=none", {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}),
        ("redis://host?protocol=3&socket_timeout=1&health_check_interval=1",
         {"protocol": 2, "socket_timeout": None, "health_check_interval": 0}),
    ],
)  # fmt: skip
def test_addresses(url: str, expected: dict[str, Any]) -> None:
    """Each form and option should reach redis-py's connection, except for options that pipelining rules out."""
    connection = connection_maker(url)()
    assert expected == {name: getattr(connection, name) for name in expected}


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6379", "http://host", "redis://", "unix://", "redis://host:port", "redis://host:99999",
     "redis://host?dbb=1", "redis://host?db=first", "redis://host?ssl_ca_certs=/ca.pem",
     "rediss://host?ssl_cert_reqs=maybe", "redis://:sec?ret@host"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    """Anything else should be refused before a connection is tried, with the forms that there are and no password."""
    with pytest.raises(ConfigError, match="unix:///path") as caught:
        connection_maker(url)
    assert "sec" not in str(caught.value)
    assert "ret@" not in str(caught.value)
