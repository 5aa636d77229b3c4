"""One run of a worker: what is executing now, in which threads, and how each execution ends.

Crash here: [H] a worker that dies inside a handler leaves a lease behind; the next claim after its end takes the job
back, the attempt counted. [O] dying after the handler and before its outcome is the same.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

from psycopg import Connection

from fencepost.jobs.claim import Job, JobClassPolicy
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.execution import Execution, Poison, Retry
from fencepost.jobs.fail import Became, fail, release
from fencepost.jobs.fence import complete
from fencepost.jobs.journal import Journal
from fencepost.jobs.lanes import Lanes
from fencepost.jobs.publish import published
from fencepost.jobs.renewal import Renewal
from fencepost.schemas import arming
from fencepost.schemas.errors import (
    EffectOpen,
    EffectUnknown,
    InvalidInput,
    LeaseLost,
    NotArmed,
    NotDispatched,
    StaleFence,
    WitnessMismatch,
)
from fencepost.schemas.identity import as_name
from fencepost.schemas.keeper import Keeper

__all__ = ["Run"]

OUTCOME_SECONDS = 10.0
OUTCOME_LANES = 2
LOOP_SECONDS = 2.0

log = logging.getLogger("fencepost.jobs")


class Handled(Protocol):
    """A class with its handler."""

    @property
    def policy(self) -> JobClassPolicy: ...
    @property
    def handler(self) -> Callable[[Any, Job], object]: ...
    @property
    def asynchronous(self) -> bool: ...


class Run:
    """Owns the threads and connections of one ``Worker.run``; used by its thread only, but for what is marked."""

    def __init__(
        self,
        dsn: str,
        owner: str,
        classes: Mapping[str, Handled],
        *,
        concurrency: int,
        state: Path | None,
        journal: Journal | None = None,
    ) -> None:
        self._dsn = dsn
        self._owner = owner
        self._classes = classes
        self._concurrency = concurrency
        self._state = state
        self._journal = journal
        self._presented = False
        self._lock = threading.Lock()
        self._executions: dict[int, Execution] = {}
        self._freed = threading.Event()
        self._work = Lanes(dsn, "work", concurrency)
        self._outcomes = Lanes(dsn, "outcome", OUTCOME_LANES, budget=OUTCOME_SECONDS)
        self._renewal = Renewal(dsn, self.running)
        self._keeper = None if state is None else Keeper(dsn, state)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts renewal, the keeper of the witness, and the event loop where a handler needs one."""
        self._renewal.start()
        if self._keeper is not None:
            self._keeper.start()
        if any(handled.asynchronous for handled in self._classes.values()):
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._loop.run_forever, name="fencepost-loop", daemon=True)
            self._loop_thread.start()

    def arm(self) -> None:
        """Arms the database after a plain restart; anything else stays disarmed, and the keeper says why."""
        self._presented = False
        if self._state is not None:
            try:
                arming.ensure_armed(self._dsn, self._state)
            except (WitnessMismatch, NotArmed) as error:
                log.error("%s", arming.explain(error))

    def disarmed(self) -> None:
        """The database was found disarmed: once it is armed, the journal is presented again before the next claim."""
        self._presented = False

    def witnessed(self, conn: Connection[Any]) -> bool:
        """Whether effects of what is claimed could be journalled, and the database was shown the begins before.

        Raises BeginsMissing when it has lost one, NotArmed.
        """
        if self._journal is None:
            return True
        if not self._journal.usable():
            return False
        if not self._presented:
            self._journal.present(conn)
            self._presented = True
        return True

    def running(self) -> list[Execution]:
        """What is executing now; from any thread."""
        with self._lock:
            return list(self._executions.values())

    def free(self) -> int:
        """How many more jobs may run."""
        with self._lock:
            return self._concurrency - len(self._executions)

    def wait(self, pause: float, stopping: threading.Event) -> None:
        """Waits for ``pause`` seconds, less when a job ends or the worker is to stop."""
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0 and not stopping.is_set():
            if self._freed.wait(min(left, 0.05)):
                self._freed.clear()
                return

    def execute(self, job: Job) -> None:
        """Starts the handler of a claimed job, in a thread of its own or on the event loop."""
        handled = self._classes[job.job_class]
        execution = Execution(job, handled.policy, self._journal)
        with self._lock:
            self._executions[id(execution)] = execution
        if handled.asynchronous and self._loop is not None:
            handler = cast(Callable[[AsyncContext, Job], Awaitable[object]], handled.handler)
            asyncio.run_coroutine_threadsafe(self._run_async(execution, handler), self._loop)
        else:
            threading.Thread(
                target=self._run_sync, args=(execution, handled.handler), name=f"fencepost-{job.job_class}", daemon=True
            ).start()

    def _run_sync(self, execution: Execution, handler: Callable[[Context, Job], object]) -> None:
        error: BaseException | None = None
        try:
            handler(Context(execution, self._work, self._outcomes), execution.job)
        except BaseException as raised:  # noqa: BLE001 (whatever it is, it is the outcome of the attempt)
            error = raised
        self._end(execution, error)

    async def _run_async(self, execution: Execution, handler: Callable[[AsyncContext, Job], Awaitable[object]]) -> None:
        context = AsyncContext(execution, self._work, self._outcomes)
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(handler(context, execution.job))
        execution.on_lost(lambda: _call_soon(loop, task.cancel))
        await asyncio.wait([task])
        self._end(execution, asyncio.CancelledError() if task.cancelled() else task.exception())

    def _end(self, execution: Execution, error: BaseException | None) -> None:
        """Sends the outcome to its own lane; the execution counts as running until it is written."""
        if not execution.settle():
            self._forget(execution)
            return
        sent = self._outcomes.send(lambda conn: _outcome(conn, execution, error))

        def written(future: Future[None]) -> None:
            if (failed := future.exception()) is not None:
                log.error("the outcome of an attempt was not written: %s; its lease will end", type(failed).__name__)
            self._forget(execution)

        sent.add_done_callback(written)

    def _forget(self, execution: Execution) -> None:
        with self._lock:
            self._executions.pop(id(execution), None)
        self._freed.set()

    def finish(self, drain: float) -> None:
        """Waits ``drain`` seconds for what is running, gives the rest back, and ends every thread that can be ended."""
        until = time.monotonic() + drain
        while self.running() and (left := until - time.monotonic()) > 0:
            self._freed.wait(min(left, 0.05))
            self._freed.clear()
        self._release([execution for execution in self.running() if not execution.writing])
        # What is publishing at this moment may still commit; the lease bounds how long that is worth waiting for.
        until = time.monotonic() + OUTCOME_SECONDS
        while any(e.writing for e in self.running()) and time.monotonic() < until:
            self._freed.wait(0.02)
            self._freed.clear()
        self._release(self.running())
        self._renewal.stop()
        self._stop_loop()
        if self._keeper is not None:
            self._keeper.stop()
        self._work.close()
        self._outcomes.close()

    def _release(self, executions: list[Execution]) -> None:
        # Invariant: whoever settles first writes the outcome; a handler that ends now finds it settled.
        waiting = [
            self._outcomes.send(lambda conn, e=execution: _given_back(conn, e))  # type: ignore[misc]
            for execution in executions
            if execution.settle()
        ]
        for execution in executions:
            execution.abandon()
        until = time.monotonic() + OUTCOME_SECONDS
        for future in waiting:
            try:
                future.result(timeout=max(0.0, until - time.monotonic()))
            except Exception as error:  # noqa: BLE001 (the lease ends by itself; the others still count)
                log.error("a claim could not be given back: %s; its lease will end", type(error).__name__)

    def _stop_loop(self) -> None:
        loop, thread = self._loop, self._loop_thread
        if loop is None or thread is None:
            return

        async def last() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=LOOP_SECONDS / 2)
            await loop.shutdown_asyncgens()
            loop.stop()

        asyncio.run_coroutine_threadsafe(last(), loop)
        thread.join(LOOP_SECONDS)
        if not thread.is_alive():
            loop.close()


def _outcome(conn: Connection[Any], execution: Execution, error: BaseException | None) -> None:
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
                    complete(conn, f)
                except EffectOpen:
                    _failed(conn, execution, "effect_open", "")
            case StaleFence() | LeaseLost():
                log.warning("%s: refused as no longer current (%s)", job.job_class, error.field)
                if not execution.lost.is_set():
                    # Refused for another reason than this claim's own fence: the claim may still hold.
                    _failed(conn, execution, "stale_fence", "")
            case asyncio.CancelledError() if execution.lost.is_set():
                return
            case Retry():
                delay = None if error.after is None else timedelta(seconds=error.after)
                _failed(conn, execution, _code(error.reason, "retry"), "", delay=delay)
            case Poison():
                _failed(conn, execution, _code(error.reason, "poison"), "", final=True)
            case EffectUnknown() | EffectOpen():
                _failed(conn, execution, "effect_unknown", "")
            case NotDispatched():
                _failed(conn, execution, "not_dispatched", type(error).__name__)
            case _:
                _failed(conn, execution, "handler_raised", type(error).__name__)
    except StaleFence as stale:
        # The job left this attempt meanwhile: blocked by its own effect, cancelled, reaped, or done by a lost commit.
        if not published(conn, f):
            log.info("%s: the outcome came too late (%s)", job.job_class, stale.field)


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


def _given_back(conn: Connection[Any], execution: Execution) -> Became | None:
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


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
