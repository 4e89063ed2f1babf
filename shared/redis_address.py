"""Where a Redis is and how to enter it: the address in `--redis-url`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from shared.errors import ConfigError

DEFAULT_PORT = 6379
_FORMS = "redis://[:password@]host:port/db, rediss://... or unix:///path"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """`path` of a unix socket, or `host` and `port`. `ca_file`: who may vouch for a TLS server, "" the system's."""

    path: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    username: str = ""
    password: str = ""
    database: int = 0
    has_tls: bool = False
    ca_file: str = ""

    def greeting(self) -> list[tuple[str, ...]]:
        """The commands that a new connection begins with."""
        commands: list[tuple[str, ...]] = []
        if self.password:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", str(self.database)))
        return commands

    def tls(self) -> ssl.SSLContext | None:
        """The context of a TLS connection, None for a plain one. Raises `OSError` when `ca_file` cannot be read."""
        return ssl.create_default_context(cafile=self.ca_file or None) if self.has_tls else None


def parse_address(url: str) -> RedisAddress:
    """The address that `url` names: redis://, rediss:// or unix://, with `?db=` and `?ssl_ca_certs=` understood.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        return _parse(parts, {name: values[-1] for name, values in options.items()})
    except ValueError:  # its text may hold a part of the password
        raise ConfigError(f"--redis-url: no address of a Redis; use {_FORMS}") from None


def _parse(parts: SplitResult, options: dict[str, str]) -> RedisAddress:
    """Raises `ValueError`."""
    is_socket = parts.scheme == "unix"
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("it begins with none of redis://, rediss://, unix://")
    if unknown := options.keys() - {"db", "ssl_ca_certs"}:
        raise ValueError(f"unknown option {min(unknown)}")
    if not (parts.path if is_socket else parts.hostname):
        raise ValueError("no path" if is_socket else "no host")
    database = options.get("db") or ("" if is_socket else parts.path.strip("/")) or "0"
    if not (database.isascii() and database.isdigit()):
        raise ValueError("the database is no number")
    return RedisAddress(
        path=unquote(parts.path) if is_socket else "",
        host="" if is_socket else (parts.hostname or ""),
        port=DEFAULT_PORT if is_socket else (parts.port or DEFAULT_PORT),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=int(database),
        has_tls=parts.scheme == "rediss",
        ca_file=options.get("ssl_ca_certs", ""),
    )
