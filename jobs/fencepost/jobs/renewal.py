"""Renewal in threads of its own: nothing a handler does, blocking or spinning, can keep its lease from being renewed.

Two threads: one talks to the database over a connection of its own, the other only looks at the monotonic clock, so
that a database that hangs cannot keep the loss of a lease from the handler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psycopg
from psycopg import Connection

from fencepost.jobs.execution import Execution
from fencepost.jobs.renew import renew
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import NotArmed, StaleFence, Unreachable

__all__ = ["Renewal"]

WATCH_SECONDS = 0.05
RETRY_SECONDS = 0.2
JOIN_SECONDS = 2.0
# Shorter than elsewhere: every other claim waits for this answer.
ANSWER_SECONDS = 10.0

log = logging.getLogger("fencepost.jobs")


class Renewal:
    """Renews every running claim at a third of its lease and tells a handler at once when its lease is lost.

    A claim whose publication is under way is left alone: its row is locked, and its commit checks the lease.
    """

    def __init__(self, dsn: str, running: Callable[[], Iterable[Execution]]) -> None:
        self._dsn = dsn
        self._running = running
        self._stopping = threading.Event()
        self._due: dict[Execution, float] = {}
        self._threads = [
            threading.Thread(target=self._renew, name="fencepost-renewal", daemon=True),
            threading.Thread(target=self._watch, name="fencepost-watch", daemon=True),
        ]

    def start(self) -> None:
        """Starts both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads; a renewal under way gets two seconds."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            for execution in self._running():
                if execution.expired() and execution.lose("lease"):
                    _told(execution, "lease")

    def _renew(self) -> None:
        while not self._stopping.is_set():
            try:
                with connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
                    while not self._stopping.wait(WATCH_SECONDS):
                        self._turn(conn)
            except (psycopg.Error, Unreachable) as error:
                log.warning("leases cannot be renewed now: %s", type(error).__name__)
                self._stopping.wait(RETRY_SECONDS)

    def _turn(self, conn: Connection[Any]) -> None:
        running = list(self._running())
        known = set(running)
        self._due = {execution: due for execution, due in self._due.items() if execution in known}
        for execution in running:
            started = time.monotonic()
            due = self._due.setdefault(execution, started + execution.job.lease / 3)
            if started < due or execution.is_lost or execution.writing:
                continue
            try:
                renew(conn, execution.job.fence)
            except StaleFence as error:
                if execution.lose(error.field or "fence"):
                    _told(execution, error.field or "fence")
            except (NotArmed, psycopg.errors.LockNotAvailable):
                # The lease is what it was: try again soon, and let the clock decide when it is over.
                self._due[execution] = started + min(RETRY_SECONDS, execution.job.lease / 10)
            else:
                execution.extend(started + execution.job.lease)
                self._due[execution] = started + execution.job.lease / 3


def _told(execution: Execution, part: str) -> None:
    job = execution.job
    log.warning(
        "lost authority (%s): %s of tenant %s, operation %s, attempt %s; its publication will be refused",
        part,
        job.job_class,
        job.tenant,
        job.operation,
        job.fence.attempt,
    )
