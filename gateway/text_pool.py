"""A few threads for work on text (parsing, templates, tokenizing), so that the event loop keeps turning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway import limits
from shared.errors import Overloaded

R = TypeVar("R")


class TextPool:
    """Bounded: at most `num_threads` jobs run and `limits.MAX_TEXT_JOBS` exist."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_jobs = 0

    async def run(self, job: Callable[[], R]) -> R:
        """What `job()` returns or raises. Raises `Overloaded` when too many jobs wait, or this one takes too long."""
        try:
            async with asyncio.timeout(limits.TEMPLATE_TIMEOUT_S):
                return await self._run(job)
        except TimeoutError:
            raise Overloaded("reading the prompt took too long; try again") from None

    def close(self) -> None:
        """Stop the threads; jobs that have not begun are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, job: Callable[[], R]) -> R:
        if self._num_jobs >= limits.MAX_TEXT_JOBS:
            raise Overloaded("too many prompts wait to be tokenized; try again")
        self._num_jobs += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)
        future.add_done_callback(lambda _: self._forget())
        return await future

    def _forget(self) -> None:
        self._num_jobs -= 1
