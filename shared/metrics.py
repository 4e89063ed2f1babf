"""The `/metrics` of services that have no HTTP server of their own: a thread of prometheus_client."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from shared.errors import ConfigError, shorten


class MetricsServer:
    """Serves a registry until closed."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port it listens on (of use when 0 was asked for)."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; waits for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> MetricsServer:
    """Serve `registry` in Prometheus' text format on every path of `host:port` (0: any free port).

    Raises:
        ConfigError: the port cannot be had, or there is no such address.
    """
    try:
        return MetricsServer(*start_http_server(port, host, registry))
    except (OSError, UnicodeError) as error:  # a host name that is none fails to be encoded
        raise ConfigError(f"metrics_host={shorten(host)} metrics_port={port}: {error}") from None
