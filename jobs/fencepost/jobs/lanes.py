"""Lanes: threads with a database connection each, for one kind of work and nothing else.

Outcomes have lanes of their own, so that neither a cancelled task nor a busy handler can eat the record of what
happened. Threads are daemons: a lane that hangs on a dead server does not keep the process from ending.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import psycopg
from psycopg import Connection

from fencepost.schemas.connect import ANSWER_SECONDS, connect
from fencepost.schemas.errors import NotArmed, Unreachable

__all__ = ["Lanes", "LanesClosed", "certain"]

T = TypeVar("T")
Work = Callable[[Connection[Any]], T]

PASSING = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable)
RETRY_SECONDS = 0.05
RETRY_SECONDS_MAX = 1.0
JOIN_SECONDS = 1.0

log = logging.getLogger("fencepost.jobs")


def certain() -> Future[Any]:
    """A future that nobody can cancel, as a task does that waits for it: what it stands for happens all the same."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class LanesClosed(Unreachable):
    """The worker has stopped; nothing was sent to the database."""


class Lanes:
    """Runs work on up to ``threads`` threads, each with an autocommit connection that is replaced when it breaks.

    ``budget`` is for how many seconds work that lost its connection, a deadlock or a wait for a lock is tried again, 0
    for never; work given to lanes with a budget must therefore be safe to repeat. At most ``waiting_max`` pieces wait. A
    statement that takes longer than ``answer_within`` seconds ends as if its connection had been lost.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        threads: int,
        *,
        budget: float = 0.0,
        waiting_max: int = 10_000,
        answer_within: float = ANSWER_SECONDS,
    ) -> None:
        self.dsn = dsn
        self._answer_within = answer_within
        self._budget = budget
        self._queue: queue.Queue[tuple[Callable[[Connection[Any]], Any], Future[Any]] | None] = queue.Queue(waiting_max)
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._name = name
        self._most = threads
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def send(self, work: Work[T]) -> Future[T]:
        """Queues the work; the future has its result or its exception, LanesClosed after ``close``."""
        future: Future[T] = certain()
        with self._sending:
            if not self._closed.is_set():
                self._queue.put((work, future))
                if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
                    self._begin()
                return future
        future.set_exception(LanesClosed("the worker has stopped", field="worker"))
        return future

    def _begin(self) -> None:
        name = f"fencepost-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def call(self, work: Work[T]) -> T:
        """Runs the work and waits for it; never call it from a lane."""
        return self.send(work).result()

    def close(self) -> None:
        """Ends the lanes after the work that is queued, waiting a second at most; the rest is answered LanesClosed."""
        with self._sending:
            self._closed.set()
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
        until = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        while True:
            try:
                left = self._queue.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                left[1].set_exception(LanesClosed("the worker has stopped", field="worker"))

    def _run(self) -> None:
        conn: Connection[Any] | None = None
        try:
            while (item := self._queue.get()) is not None:
                conn = self._do(item[0], item[1], conn)
                self._idle.release()
        finally:
            if conn is not None:
                conn.close()

    def _do(
        self, work: Callable[[Connection[Any]], Any], future: Future[Any], conn: Connection[Any] | None
    ) -> Connection[Any] | None:
        until = time.monotonic() + self._budget
        pause = RETRY_SECONDS
        while True:
            try:
                if conn is None or conn.closed:
                    conn = connect(self.dsn, autocommit=True, answer_within=self._answer_within)
                result = work(conn)
            except (psycopg.OperationalError, Unreachable, NotArmed) as error:
                # Only what may pass is tried again: a lost connection, a restart that the keeper is about to mend, and
                # what PostgreSQL rolled back because of others.
                passing = conn is None or conn.closed or isinstance(error, (NotArmed, *PASSING))
                if passing and time.monotonic() + pause < until and not self._closed.is_set():
                    time.sleep(pause)
                    pause = min(pause * 2, RETRY_SECONDS_MAX)
                    continue
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
                future.set_exception(error)
            else:
                future.set_result(result)
            return conn
