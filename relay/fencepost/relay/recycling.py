"""Recycling: outbox and ack partitions are used again once nothing needs them; ticks and identities are purged after.

Nothing goes while a slot of any destination has not acked it, or while the declared retention lasts. The proof is
PostgreSQL's (`sql/functions/relay/recycle.sql`); here is only who asks for it, and when.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
from psycopg import Connection

from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError

LEASE: LiteralString = "SELECT fencepost.lease_duty('recycling', %(owner)s, interval '30 s')"
OUTBOX: LiteralString = """
SELECT outcome, child, detail FROM fencepost.recycle_outbox(make_interval(secs => %(min_age)s))"""
ACKS: LiteralString = "SELECT outcome, detail FROM fencepost.recycle_acks()"
TICKS: LiteralString = "SELECT purged, after FROM fencepost.purge_ticks(%(after)s, %(batch)s)"
# As text: -infinity is no Python time.
KEYS: LiteralString = """
SELECT purged, after::text FROM fencepost.purge_event_keys(%(after)s::timestamptz, %(batch)s)"""

BATCH = 1000
# In one turn, so that a turn stays short; the next one goes on.
BATCHES_PER_TURN = 10
STEPS_PER_TURN = 4
MIN_AGE_SECONDS = 60.0
LOCKED_SECONDS_MAX = 60.0
STANDBY_SECONDS = 60.0
# Far more than any step takes; after it the connection is taken for dead.
ANSWER_SECONDS = 600.0

log = logging.getLogger("fencepost.relay.recycling")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did: recycled, opened, kept, locked or idle; `detail` says why, or who holds the lock."""

    outcome: str
    child: int | None
    detail: str

    @property
    def moved(self) -> bool:
        """True when there may be more to do at once."""
        return self.outcome in ("recycled", "opened")


def recycle_outbox(conn: Connection[Any], *, min_age: float = MIN_AGE_SECONDS) -> Step:
    """Truncates one partition whose every event is acked everywhere and beyond the retention, or opens the next one.

    An autocommit connection, READ COMMITTED. A partition serves at least `min_age` seconds. Waits 200 ms for a lock at
    most; what holds it (prepared transactions by name) is told in the step, and the caller tries again later.
    """
    row = conn.execute(OUTBOX, {"min_age": min_age}).fetchone()
    assert row is not None
    return Step(*row)


def recycle_acks(conn: Connection[Any]) -> Step:
    """Keeps the newest ack of each slot and truncates the rest, once they have grown large; waits 200 ms at most."""
    row = conn.execute(ACKS).fetchone()
    assert row is not None
    return Step(row[0], None, row[1])


class Recycler:
    """Recycles from a daemon thread of its own while it holds the duty, and never brings the process down.

    One recycler at a time works; the others stand by. A step that the database does not
    answer within `answer` seconds is given up with its connection. A login without the role maintenance is told once, and leaves.
    """

    def __init__(
        self, dsn: str, *, seconds: float = 5.0, min_age: float = MIN_AGE_SECONDS, answer: float = ANSWER_SECONDS
    ) -> None:
        self._dsn = dsn
        self._answer = answer
        self._seconds = seconds
        self._min_age = min_age
        self._owner = uuid4()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fencepost-recycler", daemon=True)
        self._told = ""
        self._ticks_after = -1
        self._keys_after = "-infinity"
        self._locked = 0
        self._not_before = 0.0

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def stop(self, within: float = 10.0) -> None:
        """Ends the thread, waiting at most `within` seconds for a step under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def _run(self) -> None:
        pause = self._seconds
        while not self._stopping.wait(pause):
            try:
                with connect(self._dsn, autocommit=True, answer_within=self._answer) as conn:
                    pause = self._seconds
                    while not self._stopping.is_set():
                        self.turn(conn)
                        if not self._locked:
                            self._told = ""
                        self._stopping.wait(self._seconds)
            except psycopg.errors.InsufficientPrivilege:
                log.info(
                    "this login may not recycle the outbox; grant it the role maintenance, or let another process do it"
                )
                return
            except (psycopg.Error, FencepostError) as error:
                self._tell(str(error) if isinstance(error, FencepostError) else type(error).__name__)
                pause = min(max(pause, 0.1) * 2, STANDBY_SECONDS)

    def turn(self, conn: Connection[Any]) -> None:
        """One bounded share of the work, if the duty is ours."""
        row = conn.execute(LEASE, {"owner": self._owner}).fetchone()
        if row is None or row[0] is not True:
            return
        # Crash here: [Y1] the duty is ours and nothing is done: others wait for the end of its lease.
        if time.monotonic() >= self._not_before:
            self._outbox(conn)
        recycle_acks(conn)
        for _ in range(BATCHES_PER_TURN):
            if not self._purge(conn):
                return

    def _outbox(self, conn: Connection[Any]) -> None:
        for _ in range(STEPS_PER_TURN):
            step = recycle_outbox(conn, min_age=self._min_age)
            if step.outcome == "locked":
                # Everybody who reads the outbox queues behind a lock that is waited for: rarely, then.
                self._not_before = time.monotonic() + min(
                    LOCKED_SECONDS_MAX, self._seconds * 2 ** min(self._locked, 10)
                )
                self._locked += 1
                self._tell(f"outbox_{step.child} cannot be recycled yet: {step.detail}")
                return
            self._locked = 0
            if not step.moved:
                return
            log.info("outbox_%s %s", step.child, step.outcome)

    def _purge(self, conn: Connection[Any]) -> bool:
        """One batch of ticks and one of identities; True when there may be more."""
        ticks = conn.execute(TICKS, {"after": self._ticks_after, "batch": BATCH}).fetchone()
        keys = conn.execute(KEYS, {"after": self._keys_after, "batch": BATCH}).fetchone()
        assert ticks is not None and keys is not None
        self._ticks_after, self._keys_after = ticks[1], keys[1]
        return BATCH in (ticks[0], keys[0])

    def _tell(self, line: str) -> None:
        """Each state is told once, not at every turn."""
        if line != self._told:
            self._told = line
            log.warning("%s", line)
