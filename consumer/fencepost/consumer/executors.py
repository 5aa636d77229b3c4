"""Where attempts run: sync handlers in a bounded pool of threads, async handlers in one event loop of their own.

Either way an attempt becomes a future, so that a loop which must not block never waits for a handler. Deliveries that are
given together are tried together: `Handling.attempt_many`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.consumer.transactions import AsyncDatabase, Database

__all__ = ["Attempts", "EventLoop", "Threads", "attempts"]

END_SECONDS = 10.0


class Threads:
    """Sync handlers: each attempt in a thread of a bounded pool."""

    def __init__(self, inbox: Inbox[Any], database: Database, options: RunnerOptions) -> None:
        self._handling = Handling(inbox, database, options)
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="fencepost-consumer")

    def start(self, works: Sequence[tuple[Delivery, Tries]]) -> Future[list[Handled | Again]]:
        """Starts one attempt at each; the answers stand in their order."""
        return self._pool.submit(self._handling.attempt_many, works)

    def retry(self) -> Future[bool]:
        """Starts handling one dead letter that was given back; False when there is none."""
        return self._pool.submit(self._handling.retry)

    def close(self) -> None:
        """Starts nothing more; an attempt that still runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._handling.close()


class EventLoop:
    """Async handlers: all of them in one event loop, in a thread of its own."""

    def __init__(self, inbox: AsyncInbox[Any], database: AsyncDatabase, options: RunnerOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fencepost-consumer", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(options.concurrency)
        self._handling = AsyncHandling(inbox, database, options)

    def start(self, works: Sequence[tuple[Delivery, Tries]]) -> Future[list[Handled | Again]]:
        """As `Threads.start`."""
        return asyncio.run_coroutine_threadsafe(self._attempt(works), self._loop)

    def retry(self) -> Future[bool]:
        """As `Threads.retry`."""
        return asyncio.run_coroutine_threadsafe(self._retry(), self._loop)

    async def _retry(self) -> bool:
        async with self._slots:
            return await self._handling.retry()

    async def _attempt(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        async with self._slots:
            return await self._handling.attempt_many(works)

    def close(self) -> None:
        """Cancels what still runs, which rolls back, and ends the loop."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        self._loop.close()

    async def _end(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._handling.close()


Attempts = Threads | EventLoop


def attempts(
    inbox: Inbox[Any] | AsyncInbox[Any], database: Database | AsyncDatabase, options: RunnerOptions
) -> Attempts:
    """The right one for this inbox; ConfigError for a database that does not fit it."""
    if isinstance(inbox, AsyncInbox):
        return EventLoop(inbox, cast(AsyncDatabase, database), options)
    return Threads(inbox, cast(Database, database), options)
