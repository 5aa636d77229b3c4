"""Upkeep of an inbox beside its runner: notes how long the broker keeps events, and forgets what may be forgotten.

The horizon is committed before anything is deleted; the proof is PostgreSQL's (`sql/functions/inbox/purge.sql`). Here
is only who asks for it, and when.

Crash here (P1): after the horizon, before the rows. They are deleted later; until then copies are still recognised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
from psycopg import Connection
from psycopg.types.json import Jsonb

from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError

__all__ = ["Purge", "Purged", "Upkeep"]

LEASE: LiteralString = (
    "SELECT fencepost.lease_duty('inbox ' || %(consumer)s::text, %(owner)s::uuid, interval '10 minutes')"
)
NOTE: LiteralString = "SELECT fencepost.note_topics(%(consumer)s, %(topics)s::jsonb)"
ADVANCE: LiteralString = "SELECT fencepost.advance_horizon(%(consumer)s)"
# As text: -infinity is no Python time.
RESERVATIONS: LiteralString = """
SELECT looked, purged, purged, after::text
FROM fencepost.purge_reservations(%(consumer)s, %(after)s::timestamptz, %(batch)s::integer, %(grace)s::interval)"""
DELIVERIES: LiteralString = """
SELECT looked, 0, purged, after::text
FROM fencepost.purge_deliveries(%(consumer)s, %(after)s::timestamptz, %(batch)s::integer, %(grace)s::interval)"""

BATCH = 1000
BATCHES_PER_TURN = 50
GRACE = timedelta(hours=1)
TURN_SECONDS = 60.0
# What was kept when it was looked at may have to go later: from the beginning again, once a day.
RESTART_SECONDS = 86_400.0
PAUSE_SECONDS_MAX = 600.0

log = logging.getLogger("fencepost.consumer.upkeep")


@dataclass(frozen=True, slots=True)
class Purged:
    """What one turn deleted, and whether there may be more; ``horizon`` is None where nothing is ever forgotten."""

    horizon: datetime | None
    reservations: int
    deliveries: int
    more: bool


class Purge:
    """Forgets, in bounded batches, what is older than a consumer's replay window; rows once looked at are not met again."""

    def __init__(self, consumer: str, *, batch: int = BATCH, grace: timedelta = GRACE) -> None:
        self._consumer = consumer
        self._batch = batch
        self._grace = grace
        self._places = {RESERVATIONS: "-infinity", DELIVERIES: "-infinity"}

    def turn(self, conn: Connection[Any], *, batches: int = BATCHES_PER_TURN) -> Purged:
        """Advances the horizon, then deletes; an autocommit connection, so that each step is committed before the next.

        Raises NotArmed, and InsufficientPrivilege without the role maintenance.
        """
        row = conn.execute(ADVANCE, {"consumer": self._consumer}).fetchone()
        horizon: datetime | None = None if row is None else row[0]
        if horizon is None:
            return Purged(None, 0, 0, False)
        reservations, deliveries, more = 0, 0, False
        for statement in (RESERVATIONS, DELIVERIES):
            for _ in range(batches):
                looked, *gone = self._step(conn, statement)
                reservations += gone[0]
                deliveries += gone[1]
                if looked < self._batch:
                    break
            else:
                more = True
        return Purged(horizon, reservations, deliveries, more)

    def _step(self, conn: Connection[Any], statement: LiteralString) -> tuple[int, int, int]:
        values = {
            "consumer": self._consumer,
            "after": self._places[statement],
            "batch": self._batch,
            "grace": self._grace,
        }
        row = conn.execute(statement, values).fetchone()
        assert row is not None
        self._places[statement] = row[3]
        return row[0], row[1], row[2]


class Upkeep:
    """Runs beside a consumer in a daemon thread of its own, and never brings the process down.

    ``topics`` tells the broker's retention in milliseconds by topic, -1 for ever; empty where it cannot be read. One
    process of a consumer purges at a time. A login without the role maintenance is told once, and only notes. Needs a
    connection string: beside a pool, an engine or Django it does nothing, and `fencepost inbox purge` is there.
    """

    def __init__(
        self,
        consumer: str,
        database: object,
        *,
        topics: Callable[[], Mapping[str, int]] | None = None,
        seconds: float = TURN_SECONDS,
        grace: timedelta = GRACE,
    ) -> None:
        self._consumer = consumer
        self._dsn = database if isinstance(database, str) else None
        self._topics = topics
        self._seconds = seconds
        self._owner = uuid4()
        self._grace = grace
        self._purge = Purge(consumer, grace=grace)
        self._restart_at = time.monotonic() + RESTART_SECONDS
        self._may_purge = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fencepost-upkeep", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        if self._dsn is None:
            log.info("%s: no upkeep without a connection string; run `fencepost inbox purge`", self._consumer)
            return
        self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        """Ends the thread, waiting at most ``within`` seconds for a step under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                if self._topics is None and not self._may_purge:
                    return
                with connect(self._dsn or "", autocommit=True) as conn:
                    self._note(conn)
                    pause = self._seconds
                    while self._may_purge and self._turn(conn) and not self._stopping.is_set():
                        pass
            except psycopg.errors.InsufficientPrivilege:
                self._may_purge = False
                log.info(
                    "%s: this login may not purge the inbox; grant it the role maintenance, or run `fencepost inbox purge`",
                    self._consumer,
                )
            except (psycopg.Error, FencepostError) as error:
                pause = min(max(pause, self._seconds) * 2, PAUSE_SECONDS_MAX)
                log.warning("%s: no upkeep now (%s), again in %.0f s", self._consumer, type(error).__name__, pause)

    def _note(self, conn: Connection[Any]) -> None:
        """How long the broker keeps what is read here: once, and again where it could not be read."""
        if self._topics is None:
            return
        found = dict(self._topics())
        if found:
            conn.execute(NOTE, {"consumer": self._consumer, "topics": Jsonb(found)})
            self._topics = None

    def _turn(self, conn: Connection[Any]) -> bool:
        """One bounded share, if the duty is ours; True when there may be more at once."""
        row = conn.execute(LEASE, {"consumer": self._consumer, "owner": self._owner}).fetchone()
        if row is None or row[0] is not True:
            return False
        if time.monotonic() >= self._restart_at:
            self._purge = Purge(self._consumer, grace=self._grace)
            self._restart_at = time.monotonic() + RESTART_SECONDS
        done = self._purge.turn(conn)
        if done.reservations or done.deliveries:
            log.info(
                "%s: forgot %d reservations and %d deliveries, horizon %s",
                self._consumer,
                done.reservations,
                done.deliveries,
                done.horizon,
            )
        return done.more
