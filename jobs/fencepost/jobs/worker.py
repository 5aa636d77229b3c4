"""The worker: claims up to its free capacity, keeps the leases, runs the handlers, and records what became of each.

worker = Worker()

@worker.job("report.analyse", lease=30, max_attempts=5)
def analyse(ctx: Context, job: Job) -> None:
    receipt = ctx.effect("summarise", provider.summarise, job.json())
    ctx.publish(lambda tx: save_report(tx, job, receipt))
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from fencepost.jobs.claim import DEFAULT_QUEUE, Job, JobClassPolicy, Policy, claim, marks, register_class
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.doorbell import Doorbell, prove
from fencepost.jobs.escalation import BY_OPERATORS, Reconciliation, register
from fencepost.jobs.execution import Poison, Retry, Waiting
from fencepost.jobs.journal import Journal
from fencepost.jobs.queues import CONCURRENCY_MAX, Share, shares
from fencepost.jobs.run import Run
from fencepost.jobs.schedule import Arguments, Missed, Schedule, define
from fencepost.jobs.standing import Standing
from fencepost.jobs.typed import reading_args
from fencepost.schemas.connect import ANSWER_SECONDS
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError, NotArmed, Unreachable
from fencepost.schemas.identity import as_class
from fencepost.schemas.witness import Witness

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, Retrying

    from fencepost.jobs.retrying import RetryPolicy

__all__ = ["Backoff", "Poison", "Retry", "Waiting", "Worker"]

SyncHandler = Callable[[Context, Job], object] | Callable[[Context, Job, Any], object]
AsyncHandler = Callable[[AsyncContext, Job], Awaitable[object]] | Callable[[AsyncContext, Job, Any], Awaitable[object]]
S = TypeVar("S", bound=SyncHandler)
H = TypeVar("H", bound=SyncHandler | AsyncHandler)

POLL_SECONDS_MIN = 0.02
POLL_SECONDS_MAX = 0.5
STOP_SECONDS = 0.05
HINT_SECONDS = 0.1
HINT_SECONDS_MAX = 60.0

log = logging.getLogger("fencepost.jobs")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before the first retry, doubled for each later one, and the most they become."""

    base: float = 1.0
    max: float = 300.0


@dataclass(frozen=True, slots=True)
class Registered:
    """A class with the handler that runs it."""

    policy: JobClassPolicy
    handler: Callable[[Any, Job], object]
    reconciliation: Reconciliation
    asynchronous: bool
    """Whether the handler runs on the event loop."""
    retry: RetryPolicy | None = None
    implied: bool = False
    """Whether only a schedule has named it."""


@dataclass(slots=True)
class Polls:
    """The pause before the next poll, whether the last left no capacity, and whether the operator knows that none claims.

    ``idle``: the last poll was answered, and left capacity; ``found``: something was claimed since the last rest.
    """

    pause: float = POLL_SECONDS_MIN
    full: bool = False
    told: bool = False
    idle: bool = False
    found: bool = False


class Hint:
    """Where the claims of one connection start to look; made anew every minute, for a clock may have been set back."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.text: str | None = None
        self._classes = classes
        self._next: str | None = None
        self._renewed = self._made = -HINT_SECONDS_MAX
        self._pause = HINT_SECONDS

    def renew(self, conn: psycopg.Connection[Any], *, busy: bool) -> None:
        """Moves it on, at most ten times a second while claims find work, and ever more seldom after."""
        now = time.monotonic()
        if busy:
            self._pause = HINT_SECONDS
        if now - self._renewed < self._pause:
            return
        self._renewed = now
        if not busy:
            self._pause = min(self._pause * 2, HINT_SECONDS_MAX)
        if now - self._made >= HINT_SECONDS_MAX:
            self._next = marks(conn, self._classes)
            self._made = now
        elif self._next is None:
            self.text = marks(conn, self._classes, self.text)
        elif (made := marks(conn, self._classes, self._next)) != self._next:
            self.text, self._next = made, None


class Worker:
    """Runs handlers of job classes; ``owner`` names this process in leases (default: host, process and a random part).

    With ``journal``, a folder of this worker's own, every begin of an effect is on that disk before the database has it.
    """

    def __init__(self, *, owner: str | None = None, journal: Journal | Path | None = None) -> None:
        self.owner = owner or _owner()
        self.journal = Journal(journal) if isinstance(journal, Path) else journal
        self.standing = Standing(self.owner)
        """What this worker says of itself; see ``health.serving``."""
        self._classes: dict[str, Registered] = {}
        self._schedules: dict[str, Schedule] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that have a handler."""
        return tuple(self._classes)

    def job(
        self,
        job_class: str,
        *,
        lease: float = 30.0,
        max_attempts: int = 5,
        policy: Policy = "strict",
        backoff: Backoff = Backoff(),
        max_effect_timeout: float = 30.0,
        network_bound: float = 30.0,
        max_finishes: int = 20,
        queue: str = DEFAULT_QUEUE,
        limit: int | None = None,
        tenant_limit: int | None = None,
        fair: bool = False,
        reconciliation: Reconciliation = BY_OPERATORS,
        retry: RetryPolicy | Retrying | AsyncRetrying | None = None,
    ) -> Callable[[H], H]:
        """Registers the handler of a class: ``def handler(ctx: Context, job)`` or ``async def`` with AsyncContext.

        A third parameter annotated with a pydantic model or an Event gets the args as that; args that do not fit make
        the job poison, reason ``invalid_args``, without a call.
        Durations in seconds. A handler that returns without publishing completes the job by the same fence, and what it
        returns, if not None, is kept as the job's result (JSON of at most 64 KiB, else it has failed). One that raises
        fails the attempt: it is retried with ``backoff`` until ``max_attempts`` claims are used up, then poison.
        ``Retry(after=...)`` and ``Poison(reason)`` say so explicitly. ``reconciliation``: whose its unknown effects are,
        and how their receipts are looked up. ``retry``: in tenacity's words, which exceptions are retried, how long a
        retry waits and when to stop (`retrying`); stricter than the rest, never more. See ``JobClassPolicy`` for the rest.
        ``limit`` and ``tenant_limit`` hold for all workers together.
        """
        name = as_class(job_class)
        if name in self._classes:
            raise ConfigError(f"class {name} has a handler already", field="class", hint="one handler for each class")
        made = JobClassPolicy(
            name=name,
            lease=lease,
            max_attempts=max_attempts,
            policy=policy,
            max_finishes=max_finishes,
            backoff_base=backoff.base,
            backoff_max=backoff.max,
            max_effect_timeout=max_effect_timeout,
            network_bound=network_bound,
            queue=queue,
            limit=limit,
            tenant_limit=tenant_limit,
            fair=fair,
        )

        tried = None if retry is None else _retrying(retry)

        def registered(handler: H) -> H:
            if any(each.handler is handler and each.implied for each in self._classes.values()):
                raise ConfigError(
                    "periodic is applied before job", field="schedule", hint="put @worker.periodic above @worker.job"
                )
            asynchronous = inspect.iscoroutinefunction(handler)
            self._classes[name] = Registered(made, reading_args(handler), reconciliation, asynchronous, tried)
            return handler

        return registered

    def periodic(
        self,
        schedule: str,
        *,
        tenant: str,
        cron: str | None = None,
        every: timedelta | int | None = None,
        time_zone: str | None = None,
        args: Arguments | Callable[[datetime], Arguments] | None = None,
        missed: Missed = "last",
        grace: float = 60.0,
    ) -> Callable[[H], H]:
        """Submits one job of the handler's class for each instant of ``cron`` (five fields, in ``time_zone``) or ``every``.

        @worker.periodic("report.daily", cron="0 3 * * *", time_zone="Europe/Berlin", tenant="acme")
        @worker.job("report.daily", lease=60)
        def daily(ctx: Context, job: Job) -> None: ...

        Each instant once, whatever number of workers run and restart: its operation is ``schedule@instant``. ``args``, or
        what they return for the instant (UTC), is what the job carries; by default ``{"schedule": ..., "at": ...}``.
        ``missed``: what becomes of instants while nobody ran, ``last``, ``all`` or ``skip`` (`schedule`). ``every``: whole
        seconds, counted from 1970. Without ``job`` below, the class has the schedule's name and the default policy.
        """

        def registered(handler: H) -> H:
            if schedule in self._schedules:
                raise ConfigError(
                    f"there is a schedule {schedule} already", field="schedule", hint="name each differently"
                )
            classes = [name for name, each in self._classes.items() if each.handler is handler]
            made = define(
                schedule,
                as_class(classes[-1] if classes else schedule, "schedule"),
                tenant=tenant,
                cron=cron,
                every=every,
                time_zone=time_zone,
                args=args,
                missed=missed,
                grace=grace,
            )
            if not classes:
                self.job(schedule)(handler)
                self._classes[schedule] = replace(self._classes[schedule], implied=True)
            self._schedules[schedule] = made
            return handler

        return registered

    def run(
        self,
        dsn: str,
        *,
        concurrency: int | None = None,
        queues: Mapping[str, int] | None = None,
        stop: threading.Event | None = None,
        drain: float = 10.0,
        state: Path | Witness | None = None,
        patience: float = 60.0,
        upkeep: str | None = None,
        journal: Path | None = None,
        processes: int | None = None,
        doorbell: bool = False,
    ) -> None:
        """Works until ``stop`` is set (default: until SIGTERM or SIGINT), then drains and returns.

        Claims at most ``concurrency`` jobs at a time (default: 4). With ``queues`` it serves those only, and runs at most so
        many jobs of each. On stop nothing more is claimed; running handlers get ``drain`` seconds, then their claims are
        given back uncharged, or blocked where an effect is open. With ``state`` (the
        folder of the witness) the worker arms the database after a plain restart and beats the witness. ``upkeep`` is the
        connection string under which unknown effects are escalated (role maintenance) and looked up (role reconciler);
        default: ``dsn``, and what that login may not do is left to others.
        ``journal`` takes the place of the worker's own. ``processes``: how many computations run at a time (``ctx.compute``;
        default: one for each core). With ``doorbell`` an idle worker is rung as soon as a job is due, instead of finding it
        at the next poll, which comes at most half a second later; it needs a session of its own.

        Raises ContractMismatch for a database of another version that this one cannot work with, Unreachable when the
        database does not answer for ``patience`` seconds, ConfigError without a class, for queues
        without one and for a doorbell behind a pooler in transaction mode,
        InvalidInput for a policy that the database refuses. A disarmed database is waited for. With a journal also
        JournalInUse, JournalTorn, JournalCorrupt, JournalForeign, NewerFormat, and BeginsMissing when the database has lost a
        begin.
        """
        parts = shares({name: its.policy.queue for name, its in self._classes.items()}, concurrency, queues)
        concurrency = sum(share.most for share in parts)
        if processes is not None and not 1 <= processes <= CONCURRENCY_MAX:
            raise ConfigError(f"processes is not between 1 and {CONCURRENCY_MAX}", field="processes")
        kept = self.journal if journal is None else Journal(journal)
        with nullcontext() if kept is None else kept.opened(self.owner), _stopping(stop) as stopping:
            schedules = tuple(self._schedules.values())
            run = Run(
                dsn,
                self.owner,
                self._classes,
                concurrency=concurrency,
                state=state,
                upkeep=upkeep,
                journal=kept,
                processes=processes,
                schedules=schedules,
                standing=self.standing,
            )
            run.start()
            try:
                self._work(run, dsn, stopping, patience, parts, doorbell=doorbell)
            finally:
                run.finish(drain)

    def _work(
        self,
        run: Run,
        dsn: str,
        stopping: threading.Event,
        patience: float,
        parts: Sequence[Share],
        *,
        doorbell: bool,
    ) -> None:
        answered = time.monotonic()
        proved = False
        polls = Polls()
        while not stopping.is_set():
            try:
                with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
                    run.arm()
                    for registered in self._classes.values():
                        register_class(conn, registered.policy)
                        register(conn, registered.policy.name, registered.reconciliation)
                    hint = Hint([name for share in parts for name in share.classes])
                    bell = Doorbell(conn, POLL_SECONDS_MAX) if doorbell else None
                    if bell is not None and not proved:
                        prove(conn, dsn)
                        proved = True
                    while not stopping.is_set():
                        self._turn(run, conn, hint, polls, parts)
                        answered = time.monotonic()
                        if bell is None or not _rested(bell, polls, stopping):
                            run.wait(polls.pause, stopping, full=polls.full)
            except (psycopg.OperationalError, Unreachable) as error:
                self.standing.unanswered()
                self.standing.moved()
                if time.monotonic() - answered >= patience:
                    raise
                log.warning("the database does not answer, trying again: %s", type(error).__name__)
                polls.pause = min(max(polls.pause, POLL_SECONDS_MIN) * 2, POLL_SECONDS_MAX * 4)
                stopping.wait(polls.pause)

    def _turn(self, run: Run, conn: psycopg.Connection[Any], hint: Hint, polls: Polls, parts: Sequence[Share]) -> None:
        """One poll, and how long to wait for the next."""
        self.standing.moved()
        rooms = [(share, free) for share in parts if (free := run.free(share)) > 0]
        polls.full = len(rooms) < len(parts)
        polls.idle = False
        if not rooms:
            polls.pause = POLL_SECONDS_MIN
            return
        found = more = False
        try:
            if not run.witnessed(conn):
                polls.pause = POLL_SECONDS_MAX
                return
            for share, free in rooms:
                # Half of the capacity at once: while one half is completed the other runs, and the next is claimed.
                asked = min(free, share.half)
                jobs = claim(conn, self.owner, share.classes, asked, hint.text)
                if jobs:
                    self.standing.claimed(jobs)
                    run.execute(jobs)
                found = found or bool(jobs)
                polls.full = polls.full or len(jobs) == asked
                more = more or len(jobs) == asked < free
        except NotArmed as error:
            run.disarmed()
            self.standing.answered(armed=False)
            if not polls.told:
                log.error("nothing is claimed: %s", error)
            polls.pause, polls.told = POLL_SECONDS_MAX, True
            return
        self.standing.answered(armed=True)
        hint.renew(conn, busy=found)
        polls.told = False
        polls.idle, polls.found = not polls.full, polls.found or found
        if more:
            polls.pause = 0.0
        else:
            polls.pause = POLL_SECONDS_MIN if found else min(max(polls.pause, POLL_SECONDS_MIN) * 1.5, POLL_SECONDS_MAX)


def _retrying(given: RetryPolicy | Retrying | AsyncRetrying) -> RetryPolicy:
    # Imported here: who gives one has tenacity, and nobody else needs it.
    from fencepost.jobs.retrying import policy_of

    return policy_of(given)


def _rested(bell: Doorbell, polls: Polls, stopping: threading.Event) -> bool:
    """Rests by the bell after a poll that left capacity, else False: then it is for the pause."""
    try:
        if not polls.idle:
            bell.awake()
            return False
        if bell.rest(polls.pause, stopping, found=polls.found):
            polls.pause = POLL_SECONDS_MIN
        polls.found = False
    except NotArmed:
        # The next poll tells it.
        return False
    return True


@contextmanager
def _stopping(stop: threading.Event | None) -> Generator[threading.Event]:
    """The event given, or one that SIGTERM and SIGINT set while this runs in the main thread."""
    stopping = stop or threading.Event()
    if stop is not None or threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def told(_number: int, _frame: object) -> None:
        stopping.set()

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _owner() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:100] or "host"
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
