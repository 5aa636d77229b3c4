"""What became of each attempt, written so that writing it again after a lost connection changes nothing.

Handlers that simply returned are completed together, as many as have ended since the last time: one statement, and each
under its own fence.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

from psycopg import Connection

from fencepost.jobs.execution import Execution, Poison, Retry
from fencepost.jobs.fail import Became, fail, release
from fencepost.jobs.fence import complete, complete_many
from fencepost.jobs.lanes import Lanes
from fencepost.jobs.publish import published
from fencepost.jobs.result import complete_with
from fencepost.schemas.errors import (
    EffectOpen,
    EffectUnknown,
    InvalidArgs,
    InvalidInput,
    LeaseLost,
    NotDispatched,
    StaleFence,
)
from fencepost.schemas.identity import as_name

__all__ = ["Completions", "given_back", "outcome"]

BATCH_MAX = 500

log = logging.getLogger("fencepost.jobs")


class Completions:
    """Completes what has ended, one batch at a time: the next forms while one is written; usable from any thread.

    ``written`` is called with executions and a future that holds what went wrong, if anything; ``refused`` with each
    whose completion was refused: its outcome is still to be found.
    """

    def __init__(
        self,
        lanes: Lanes,
        written: Callable[[Sequence[Execution], Future[Any]], None],
        refused: Callable[[Execution], None],
    ) -> None:
        self._lanes = lanes
        self._written = written
        self._refused = refused
        self._lock = threading.Lock()
        self._ended: list[Execution] = []
        self._writing = False

    def add(self, execution: Execution) -> None:
        """The handler of this execution returned; it is written soon."""
        with self._lock:
            self._ended.append(execution)
            if self._writing:
                return
            self._writing = True
        self._send()

    def _send(self) -> None:
        batch: list[Execution] = []
        sent = self._lanes.send(partial(self._write, batch))
        sent.add_done_callback(partial(self._done, batch))

    def _take(self, batch: list[Execution], most: int | None) -> None:
        with self._lock:
            batch.extend(self._ended[:most])
            del self._ended[:most]

    def _write(self, batch: list[Execution], conn: Connection[Any]) -> list[Execution]:
        # Repeated after a lost connection, it stays with what it took; what was done by then is refused, and looked up.
        if not batch:
            self._take(batch, BATCH_MAX)
        refused = complete_many(conn, [execution.job.fence for execution in batch])
        return [batch[index] for index in refused]

    def _done(self, batch: list[Execution], future: Future[list[Execution]]) -> None:
        if not batch:
            # The lanes have closed: nothing will be written.
            self._take(batch, None)
        with self._lock:
            self._writing = bool(self._ended)
            more = self._writing
        if more:
            self._send()
        refused = [] if future.exception() is not None else future.result()
        self._written([execution for execution in batch if execution not in refused], future)
        for execution in refused:
            self._refused(execution)


def outcome(conn: Connection[Any], execution: Execution, error: BaseException | None) -> None:
    """Writes what became of an attempt; repeated after a lost connection, so each branch must bear repetition."""
    job = execution.job
    f = job.fence
    if execution.published:
        if error is not None:
            log.warning("%s: the handler raised after it had published: %s", job.job_class, type(error).__name__)
        return
    try:
        match error:
            case None:
                try:
                    complete(conn, f) if execution.result is None else complete_with(conn, f, execution.result)
                except EffectOpen:
                    _failed(conn, execution, "effect_open", "")
            case StaleFence() | LeaseLost():
                log.warning("%s: refused as no longer current (%s)", job.job_class, error.field)
                if not execution.is_lost:
                    # Refused for another reason than this claim's own fence: the claim may still hold.
                    _failed(conn, execution, "stale_fence", "")
            case asyncio.CancelledError() if execution.is_lost:
                return
            case Retry() if error.after is not None:
                _failed(conn, execution, _code(error.reason, "retry"), "", delay=timedelta(seconds=error.after))
            case Retry():
                _tried(conn, execution, error, _code(error.reason, "retry"), "")
            case Poison():
                _failed(conn, execution, _code(error.reason, "poison"), "", final=True)
            case InvalidArgs():
                _failed(conn, execution, "invalid_args", error.field or "", final=True)
            case EffectUnknown() | EffectOpen():
                _failed(conn, execution, "effect_unknown", "")
            case NotDispatched():
                _tried(conn, execution, error, "not_dispatched", type(error).__name__)
            case _:
                _tried(conn, execution, error, "handler_raised", type(error).__name__)
    except StaleFence as stale:
        # The job left this attempt meanwhile: blocked by its own effect, cancelled, reaped, or done by a lost commit.
        if not published(conn, f):
            log.info("%s: the outcome came too late (%s)", job.job_class, stale.field)


def _tried(conn: Connection[Any], execution: Execution, error: BaseException, reason: str, detail: str) -> None:
    """As the class's retry policy says, where there is one."""
    if execution.retry is None:
        _failed(conn, execution, reason, detail)
        return
    said = execution.retry.verdict(execution.job, execution.policy, error, asked=isinstance(error, Retry))
    # What made it final stays told: the reason is the policy's, the detail what happened.
    detail = detail if said.reason is None else detail or reason
    _failed(conn, execution, said.reason or reason, detail, delay=said.delay, final=said.final)


def _failed(
    conn: Connection[Any],
    execution: Execution,
    reason: str,
    detail: str,
    *,
    delay: timedelta | None = None,
    final: bool = False,
) -> None:
    job = execution.job
    became = fail(conn, job.fence, reason, detail=detail, delay=delay, final=final)
    level = logging.WARNING if became != "queued" else logging.INFO
    log.log(level, "%s: attempt %d failed (%s %s): %s", job.job_class, job.attempts, reason, detail, became)


def given_back(conn: Connection[Any], execution: Execution) -> Became | None:
    if execution.published:
        return None
    try:
        became = release(conn, execution.job.fence)
    except StaleFence:
        return None
    if became == "blocked":
        log.warning("%s: given back with an open effect, blocked until it is reconciled", execution.job.job_class)
    return became


def _code(reason: str, otherwise: str) -> str:
    """A reason given by a handler, if it is a code; text could quote content."""
    try:
        return as_name(reason, "reason")
    except InvalidInput:
        return otherwise
