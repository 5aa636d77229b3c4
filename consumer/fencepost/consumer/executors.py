"""Where attempts run: sync handlers in a bounded pool of threads, async handlers in one event loop of their own.

Either way an attempt becomes a future, so that a loop which must not block never waits for a handler. Deliveries that are
given together are tried together: `Handling.attempt_many`. Threads are daemons: a handler that outlasts the drain does not
keep the process from ending; its transaction goes with its connection.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, LiteralString, ParamSpec, TypeVar, cast

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.consumer.transactions import AsyncDatabase, Database

__all__ = ["Attempts", "Daemons", "EventLoop", "Threads", "attempts"]

log = logging.getLogger("fencepost.consumer")

END_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Daemons(Executor):
    """At most ``limit`` calls at a time, each in a thread that no process waits for when it ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._threads = 0
        self._closed = False
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs the call as soon as a thread is free; RuntimeError after the shutdown."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("nothing more is started after the shutdown")
            self._queue.put((future, partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._threads < self._limit:
                self._threads += 1
                name = f"fencepost-consumer-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Starts nothing more and waits for nothing; calls that run end by themselves, or with the process."""
        with self._lock:
            self._closed = True
            try:
                while (item := self._queue.get_nowait()) is not None:
                    item[0].cancel()
            except Empty:
                pass
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  # whatever it was, it is the future's
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, call  # An idle thread keeps nobody's payload.
            self._idle.release()
        self._queue.put(None)  # For the next thread.


class Threads:
    """Sync handlers: each attempt in a thread of a bounded pool."""

    def __init__(self, inbox: Inbox[Any], database: Database, options: RunnerOptions) -> None:
        self._handling = Handling(inbox, database, options)
        # One more than handlers run: what is asked beside them waits for none.
        self._pool = Daemons(options.concurrency + 1)

    def start(self, works: Sequence[tuple[Delivery, Tries]]) -> Future[list[Handled | Again]]:
        """Starts one attempt at each; the answers stand in their order."""
        return self._pool.submit(self._handling.attempt_many, works)

    def retry(self) -> Future[bool]:
        """Starts handling one dead letter that was given back; False when there is none."""
        return self._pool.submit(self._handling.retry)

    def fetch(self, statement: LiteralString, values: Mapping[str, object]) -> Future[list[tuple[Any, ...]]]:
        """Starts a statement of the runner's own; waits for no handler."""
        return self._pool.submit(self._handling.fetch, statement, values)

    def close(self) -> None:
        """Starts nothing more; an attempt that still runs ends by itself."""
        self._pool.shutdown()
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

    def fetch(self, statement: LiteralString, values: Mapping[str, object]) -> Future[list[tuple[Any, ...]]]:
        """As `Threads.fetch`."""
        return asyncio.run_coroutine_threadsafe(self._handling.fetch(statement, values), self._loop)

    async def _retry(self) -> bool:
        async with self._slots:
            return await self._handling.retry()

    async def _attempt(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        async with self._slots:
            return await self._handling.attempt_many(works)

    def close(self) -> None:
        """Cancels what still runs, which rolls back, and ends the loop; one that a handler blocks is left behind."""
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_SECONDS)
        except TimeoutError:
            log.warning("handlers that take no cancellation are left behind")
            return
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
