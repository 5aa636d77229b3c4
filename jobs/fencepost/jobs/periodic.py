"""Submits what schedules are due beside a worker: each instant exactly once, whatever number of workers run it.

The database's clock says what is due. Taking a schedule, submitting and moving it on are one transaction: of several
workers one does it, and one that dies in between has done nothing.

Crash here: [S] before that commit: the next worker finds the schedule where it was, and submits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from fencepost.jobs import schedule as schedules
from fencepost.jobs.schedule import Schedule, Taken
from fencepost.jobs.submit import submit
from fencepost.schemas.connect import ANSWER_SECONDS
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import NotArmed, OperationConflict

__all__ = ["Periodic"]

BATCH_MAX = 100
PAUSE_SECONDS_MIN = 0.02
PAUSE_SECONDS_MAX = 5.0
# Another worker has it, or it may not be submitted now.
BUSY_SECONDS = 0.5
# Between looks at definitions that are not current, and before one whose arguments failed is tried again.
AGAIN_SECONDS = 30.0
SEE_SECONDS = 20.0

log = logging.getLogger("fencepost.jobs.periodic")


class Periodic:
    """Runs beside a worker in a daemon thread of its own, and never brings the process down."""

    def __init__(self, dsn: str, worker: str, registered: Sequence[Schedule]) -> None:
        self._dsn = dsn
        self._worker = worker
        self._schedules = {each.name: each for each in registered}
        self._versions: dict[str, int] = {}
        self._started = False
        self._looked = self._seen = -AGAIN_SECONDS
        self._failed: dict[str, float] = {}
        self._told: type[Exception] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fencepost-periodic", daemon=True)

    def start(self) -> None:
        """Starts the thread where there is a schedule; returns at once."""
        if self._schedules:
            self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        """Ends the thread, waiting at most ``within`` seconds for a transaction under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                with connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
                    while not self._stopping.is_set():
                        pause = self.turn(conn)
                        self._told = None
                        self._stopping.wait(pause)
            except Exception as error:  # noqa: BLE001 (what is wrong now may be right again; nothing is lost meanwhile)
                pause = min(max(pause, BUSY_SECONDS) * 2, AGAIN_SECONDS)
                if type(error) is not self._told:
                    self._told = type(error)
                    log.warning("nothing is submitted by schedules for now: %s", type(error).__name__)

    def turn(self, conn: Connection[Any]) -> float:
        """Registers, and submits what is due, on an autocommit connection; for how many seconds nothing is to do."""
        now = time.monotonic()
        if now - self._looked >= AGAIN_SECONDS:
            self._register(conn)
            self._looked = now
        if now - self._seen >= SEE_SECONDS:
            schedules.see(conn, self._versions, self._worker)
            self._seen = now
        able = {name: version for name, version in self._versions.items() if self._failed.get(name, 0.0) <= now}
        try:
            while not self._stopping.is_set() and self._submit(conn, able):
                pass
        except NotArmed:
            return PAUSE_SECONDS_MAX
        left = schedules.until_next(conn, able)
        if left is None or left > PAUSE_SECONDS_MAX:
            return PAUSE_SECONDS_MAX
        return BUSY_SECONDS if left <= 0 else max(left, PAUSE_SECONDS_MIN)

    def _register(self, conn: Connection[Any]) -> None:
        for name, each in self._schedules.items():
            if self._started and name in self._versions and self._current(conn, name):
                continue
            version = schedules.register(conn, each, self._worker, starting=not self._started)
            if version is not None:
                self._versions[name] = version
            elif self._versions.pop(name, None) is not None:
                log.warning("schedule %s was changed or removed: left to the workers of its new definition", name)
        self._started = True

    def _current(self, conn: Connection[Any], name: str) -> bool:
        return schedules.until_next(conn, {name: self._versions[name]}) is not None

    def _submit(self, conn: Connection[Any], able: dict[str, int]) -> bool:
        """One schedule's share, in one transaction; False when none is due that others do not have."""
        name = ""
        try:
            with conn.transaction():
                taken = schedules.take(conn, able, self._worker)
                if taken is None:
                    return False
                name = taken.schedule
                self._advance(conn, self._schedules[name], taken)
        except (NotArmed, psycopg.OperationalError):
            raise
        except Exception as error:
            # The application's arguments: the other schedules go on.
            if not name:
                raise
            log.error("schedule %s submits nothing, its arguments failed: %s", name, type(error).__name__)
            self._failed[name] = time.monotonic() + AGAIN_SECONDS
            able.pop(name, None)
        return bool(able)

    def _advance(self, conn: Connection[Any], each: Schedule, taken: Taken) -> None:
        if taken.restored:
            log.error(
                "schedule %s starts anew after the restore: what was due until %s is not submitted",
                each.name,
                taken.now,
            )
        chosen, missed = each.due(taken.position, taken.now)
        batch, rest = chosen[:BATCH_MAX], chosen[BATCH_MAX:]
        for at in batch:
            self._one(conn, each, at)
        position = batch[-1] if rest else taken.now
        following = rest[0] if rest else next(each.timetable.after(taken.now), None)
        schedules.advance(conn, each.name, position, following, submitted=batch, missed=missed)
        if missed:
            log.warning("schedule %s: %d instants were missed (%s)", each.name, missed, each.missed)

    def _one(self, conn: Connection[Any], each: Schedule, at: datetime) -> None:
        try:
            with conn.transaction():
                submit(
                    conn,
                    each.job_class,
                    tenant=each.tenant,
                    operation=each.operation(at),
                    args=each.args(at),
                    run_at=at,
                )
        except OperationConflict:
            # Submitted before with other arguments, when the schedule was removed and came again.
            log.warning("schedule %s: the job of %s is there already, with other arguments", each.name, at)
