"""Texts served as /metrics, and what a small cell's say."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest

QUIRE = """# TYPE quire:workers gauge
quire:workers{model_name="m"} 2.0
quire:num_blocks{model_name="m"} 100.0
quire:most_blocks_used{model_name="m"} 80.0
quire:most_running{model_name="m"} 4.0
quire:kv_slot_utilization{model_name="m"} 0.98
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:num_requests_running{model_name="m"} 4.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
vllm:num_preemptions_total{model_name="m"} 0.0
vllm:prefix_cache_queries_total{model_name="m"} 0.0
vllm:prefix_cache_hits_total{model_name="m"} 0.0
vllm:request_prompt_tokens_count{model_name="m"} 0.0
vllm:request_prompt_tokens_sum{model_name="m"} 0.0
vllm:request_generation_tokens_count{model_name="m"} 0.0
vllm:request_generation_tokens_sum{model_name="m"} 0.0
vllm:time_per_output_token_seconds_count{model_name="m"} 0.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",cache_dtype="auto"} 1.0
quire:engine_config_info{device="cpu",dtype="bfloat16",max_num_seqs="2"} 1.0
vllm:time_to_first_token_seconds_count{model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 9.0
"""
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a text at any path, with a status; gives the address."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(text: str | bytes, status: int = 200) -> str:
        data = text if isinstance(text, bytes) else text.encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
