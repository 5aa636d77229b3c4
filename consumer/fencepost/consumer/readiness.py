"""Whether a consumer can work: looked at every few seconds on a connection of its own, told at once from what was last seen.

Readiness is about database, broker and membership; liveness only about whether the loop moves.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import psycopg

from fencepost.consumer.standing import BrokerState, Standing
from fencepost.schemas.connect import Punctual, connect
from fencepost.schemas.database_state import DatabaseState, looked, refused
from fencepost.schemas.errors import FencepostError

__all__ = ["Report", "State", "Watch"]

LOOK_SECONDS = 5.0
ANSWER_SECONDS = 5.0

log = logging.getLogger("fencepost.consumer.readiness")


class State(StrEnum):
    """The whole consumer in one word; anything but ready has its reason in the report."""

    READY = "ready"
    DRAINING = "draining"
    DISARMED = "disarmed"
    DATABASE = "database"
    BROKER = "broker"
    NOT_CONSUMING = "not_consuming"


@dataclass(frozen=True, slots=True)
class Report:
    """What `/readyz` says: typed states and counts, no address and no secret.

    No partition assigned is right where other members have them all. ``oldest_unhandled_seconds`` is None while nothing is
    in hand, ``lag`` where it is not known.
    """

    state: State
    consumer: str
    kind: str
    database: DatabaseState
    broker: BrokerState
    consuming: bool
    assigned: int | None
    in_flight: int
    oldest_unhandled_seconds: float | None
    lag: int | None

    @property
    def ready(self) -> bool:
        """Whether everything that handling needs is there."""
        return self.state is State.READY

    def document(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"ready": self.ready, **asdict(self)}


class Watch:
    """Looks from a thread of its own, with a deadline for every look; asking never waits for anything.

    What was seen counts as unknown once it is older than ``stale`` seconds, so a hung look cannot keep a consumer ready.
    """

    def __init__(self, dsn: str, standing: Standing, *, look: float = LOOK_SECONDS) -> None:
        self._dsn = dsn
        self.standing = standing
        self._look_seconds = look
        self.stale = 3 * look + 3 * ANSWER_SECONDS
        self._ended = threading.Event()
        self._database = (DatabaseState.UNKNOWN, 0.0)
        self._thread = threading.Thread(target=self._run, name="consumer-watch", daemon=True)

    def start(self) -> None:
        """Begins to look; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end and waits for a look under way, at most a few seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2)

    def moving(self, stalled: float) -> bool:
        """True while the loop took a step within ``stalled`` seconds; depends on nothing outside this process."""
        return time.monotonic() - self.standing.moved_at < stalled

    def report(self) -> Report:
        """How everything stands, from what was last seen."""
        state, at = self._database
        database = state if time.monotonic() - at <= self.stale else DatabaseState.UNKNOWN
        standing = self.standing
        return Report(
            self._state(database),
            standing.consumer,
            standing.kind,
            database,
            standing.broker,
            standing.consuming,
            standing.assigned,
            standing.in_flight(),
            standing.oldest(),
            standing.lag,
        )

    def _state(self, database: DatabaseState) -> State:
        if self.standing.draining:
            return State.DRAINING
        if database is DatabaseState.DISARMED:
            return State.DISARMED
        if database is not DatabaseState.READY:
            return State.DATABASE
        if self.standing.broker is not BrokerState.CONNECTED:
            return State.BROKER
        return State.READY if self.standing.consuming else State.NOT_CONSUMING

    def _run(self) -> None:
        conn: Punctual[Any] | None = None
        while not self._ended.is_set():
            try:
                if conn is None or conn.closed:
                    conn = connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS)
                state = looked(conn)
            except (psycopg.Error, FencepostError) as error:
                state = refused(error)
            except Exception as error:  # noqa: BLE001 - a watch that ended would make a good consumer unready for ever
                log.error("looking at the database failed: %s", type(error).__name__)
                state = DatabaseState.UNKNOWN
            self._database = (state, time.monotonic())
            self._ask()
            self._ended.wait(self._look_seconds)
        if conn is not None:
            conn.close()

    def _ask(self) -> None:
        """Where the runner's client does not tell a broker's absence by itself."""
        asks = self.standing.asks
        if asks is not None and self.standing.broker is not BrokerState.CONNECTING:
            self.standing.broker = asks()
