"""One run of a worker: what is executing now, in which threads, and how each execution ends.

Crash here: [H] a worker that dies inside a handler leaves a lease behind; the next claim after its end takes the job
back, the attempt counted. [O] dying after the handler and before its outcome is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from psycopg import Connection

from fencepost.jobs.claim import Job, JobClassPolicy
from fencepost.jobs.compute import Computers
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.escalation import Reconciliation
from fencepost.jobs.execution import Execution
from fencepost.jobs.journal import Journal
from fencepost.jobs.lanes import Lanes
from fencepost.jobs.outcomes import Completions, given_back, outcome
from fencepost.jobs.periodic import Periodic
from fencepost.jobs.queues import Share
from fencepost.jobs.renewal import Renewal
from fencepost.jobs.schedule import Schedule
from fencepost.jobs.standing import Standing, ending
from fencepost.jobs.upkeep import Upkeep
from fencepost.schemas import arming
from fencepost.schemas.errors import NotArmed, WitnessMismatch
from fencepost.schemas.keeper import Keeper
from fencepost.schemas.witness import Witness

if TYPE_CHECKING:
    from fencepost.jobs.retrying import RetryPolicy

__all__ = ["Run"]

OUTCOME_SECONDS = 10.0
OUTCOME_LANES = 2
LOOP_SECONDS = 2.0

AsyncHandler = Callable[[AsyncContext, Job], Coroutine[Any, Any, object]]

log = logging.getLogger("fencepost.jobs")


class Handled(Protocol):
    """A class with its handler."""

    @property
    def policy(self) -> JobClassPolicy: ...
    @property
    def handler(self) -> Callable[[Any, Job], object]: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def reconciliation(self) -> Reconciliation: ...
    @property
    def retry(self) -> RetryPolicy | None: ...


class Run:
    """Owns the threads and connections of one ``Worker.run``; used by its thread only, but for what is marked."""

    def __init__(
        self,
        dsn: str,
        owner: str,
        classes: Mapping[str, Handled],
        *,
        concurrency: int,
        state: Path | Witness | None,
        upkeep: str | None = None,
        journal: Journal | None = None,
        processes: int | None = None,
        schedules: Sequence[Schedule] = (),
        standing: Standing | None = None,
    ) -> None:
        self._dsn = dsn
        self._owner = owner
        self._classes = classes
        self._state = state
        self._journal = journal
        self._standing = standing or Standing(owner)
        self._standing.running = self.running
        self._standing.capacity = concurrency
        self._presented = False
        self._lock = threading.Lock()
        self._executions: dict[int, Execution] = {}
        self._freed = threading.Event()
        self._work = Lanes(dsn, "work", concurrency)
        self._outcomes = Lanes(dsn, "outcome", OUTCOME_LANES, budget=OUTCOME_SECONDS)
        self._completions = Completions(self._outcomes, self._written, partial(self._write, error=None))
        self._renewal = Renewal(dsn, self.running)
        self._keeper = None if state is None else Keeper(dsn, state)
        look_ups = {n: h.reconciliation.look_up for n, h in classes.items() if h.reconciliation.look_up is not None}
        self._upkeep = Upkeep(upkeep or dsn, owner, look_ups)
        self._computers = Computers(processes)
        self._periodic = Periodic(dsn, owner, schedules)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts renewal, the keeper of the witness, and the event loop where a handler needs one."""
        self._renewal.start()
        self._upkeep.start()
        self._periodic.start()
        if self._keeper is not None:
            self._keeper.start()
        if any(handled.asynchronous for handled in self._classes.values()):
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(
                target=_run_until_stopped, args=(self._loop,), name="fencepost-loop", daemon=True
            )
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
        self._standing.journal_usable = self._journal.usable()
        if not self._standing.journal_usable:
            return False
        if not self._presented:
            self._journal.present(conn)
            self._presented = True
        return True

    def running(self) -> list[Execution]:
        """What is executing now; from any thread."""
        with self._lock:
            return list(self._executions.values())

    def free(self, share: Share) -> int:
        """How many more jobs of these classes may run."""
        with self._lock:
            if share.alone:
                return share.most - len(self._executions)
            return share.most - sum(e.job.job_class in share.classes for e in self._executions.values())

    def wait(self, pause: float, stopping: threading.Event, *, full: bool) -> None:
        """Waits for ``pause`` seconds, less when the worker is to stop, or when it was full and a job ends."""
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0 and not stopping.is_set():
            if not full:
                time.sleep(min(left, 0.05))
            elif self._freed.wait(min(left, 0.05)):
                self._freed.clear()
                return

    def execute(self, jobs: Sequence[Job]) -> None:
        """Starts the handlers of claimed jobs, each in a thread of its own or together on the event loop."""
        classes = [self._classes[job.fence.job_class] for job in jobs]
        executions = [Execution(j, c.policy, self._journal, c.retry) for j, c in zip(jobs, classes, strict=True)]
        with self._lock:
            self._executions.update((id(execution), execution) for execution in executions)
        if self._loop is not None and (looped := [e for e in executions if self._handled(e).asynchronous]):
            self._loop.call_soon_threadsafe(self._run_async, self._loop, looped)
        for execution in executions:
            if not (handled := self._handled(execution)).asynchronous:
                name = f"fencepost-{execution.job.job_class}"
                threading.Thread(
                    target=self._run_sync, args=(execution, handled.handler), name=name, daemon=True
                ).start()

    def _handled(self, execution: Execution) -> Handled:
        return self._classes[execution.job.fence.job_class]

    def _run_sync(self, execution: Execution, handler: Callable[[Context, Job], object]) -> None:
        error: BaseException | None = None
        try:
            error = execution.keep(
                handler(Context(execution, self._work, self._outcomes, self._computers), execution.job)
            )
        except BaseException as raised:  # noqa: BLE001 (whatever it is, it is the outcome of the attempt)
            error = raised
        self._end(execution, error)

    def _run_async(self, loop: asyncio.AbstractEventLoop, executions: Sequence[Execution]) -> None:
        for execution in executions:
            handler = cast("AsyncHandler", self._handled(execution).handler)
            context = AsyncContext(execution, self._work, self._outcomes, self._computers)
            try:
                task = loop.create_task(handler(context, execution.job))
            except Exception as error:  # noqa: BLE001 (it takes other arguments: the outcome of the attempt)
                self._end(execution, error)
                continue
            execution.on_lost(partial(_call_soon, loop, task.cancel))
            task.add_done_callback(partial(self._ended, execution))

    def _ended(self, execution: Execution, task: asyncio.Task[object]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._end(execution, error or execution.keep(task.result()))

    def _end(self, execution: Execution, error: BaseException | None) -> None:
        """Sends the outcome to its own lane; the execution counts as running until it is written."""
        self._standing.ended(execution.job.fence.job_class, ending(execution, error))
        if not execution.settle() or (execution.published and error is None):
            self._forget([execution])
        elif error is None and execution.result is None:
            self._completions.add(execution)
        else:
            self._write(execution, error)

    def _write(self, execution: Execution, error: BaseException | None) -> None:
        sent = self._outcomes.send(lambda conn: outcome(conn, execution, error))
        sent.add_done_callback(partial(self._written, [execution]))

    def _written(self, executions: Sequence[Execution], future: Future[Any]) -> None:
        if (failed := future.exception()) is not None:
            self._standing.unwritten(len(executions))
            log.error(
                "the outcome of %d attempts was not written: %s; their leases will end",
                len(executions),
                type(failed).__name__,
            )
        self._forget(executions)

    def _forget(self, executions: Sequence[Execution]) -> None:
        with self._lock:
            for execution in executions:
                self._executions.pop(id(execution), None)
        self._freed.set()

    def finish(self, drain: float) -> None:
        """Waits ``drain`` seconds for what is running, gives the rest back, and ends every thread that can be ended."""
        self._periodic.stop()
        self._standing.draining = True
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
        self._computers.close()
        self._renewal.stop()
        self._upkeep.stop()
        self._stop_loop()
        if self._keeper is not None:
            self._keeper.stop()
        self._work.close()
        self._outcomes.close()

    def _release(self, executions: list[Execution]) -> None:
        # Invariant: whoever settles first writes the outcome; a handler that ends now finds it settled.
        waiting = [
            self._outcomes.send(lambda conn, e=execution: given_back(conn, e))  # type: ignore[misc]
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


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    # Invariant: whoever waits for this thread may give up, and the loop is closed all the same.
    try:
        loop.run_forever()
    finally:
        loop.close()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # It is closed: nobody is left to call.
        loop.call_soon_threadsafe(call)
