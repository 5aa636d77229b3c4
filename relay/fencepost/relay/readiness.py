"""How the relay stands: looked at every few seconds on a connection of its own, told at once from what was last seen.

Readiness is about database, authority and brokers; liveness only about whether the loops move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import psycopg

from fencepost.relay.backlog import oldest
from fencepost.relay.destination import Destination
from fencepost.relay.loop import DestinationLoop
from fencepost.schemas.connect import Punctual, connect
from fencepost.schemas.database_state import DatabaseState, looked, refused
from fencepost.schemas.errors import FencepostError

__all__ = ["BrokerState", "DestinationReport", "Report", "State", "Watch"]

LOOK_SECONDS = 5.0
ANSWER_SECONDS = 5.0
BROKER_SECONDS = 2.0

log = logging.getLogger("fencepost.relay.readiness")


class BrokerState(StrEnum):
    """What was last seen of a broker; connecting: it never answered yet."""

    CONNECTED = "connected"
    CONNECTING = "connecting"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class State(StrEnum):
    """The whole relay in one word; anything but ready has its reason in the report."""

    READY = "ready"
    DRAINING = "draining"
    DISARMED = "disarmed"
    DATABASE = "database"
    BROKER = "broker"
    NO_LEASE = "no_lease"


@dataclass(frozen=True, slots=True)
class DestinationReport:
    """How one destination stands. Zero slots under a lease are right where other relays hold them all.

    `oldest_unsent_seconds` is None while nothing waits or the age is not known.
    """

    broker: BrokerState
    leased: bool
    slots_held: int
    in_flight: int
    oldest_unsent_seconds: float | None
    last_trouble: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `/readyz` says: typed states and counts, no address and no secret."""

    state: State
    database: DatabaseState
    destinations: dict[str, DestinationReport]

    @property
    def ready(self) -> bool:
        """Whether everything that publishing needs is there."""
        return self.state is State.READY

    def document(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"ready": self.ready, **asdict(self)}


class Watch:
    """Looks from a thread of its own, with a deadline for every look; asking never waits for anything.

    What was seen counts as unknown once it is older than `stale` seconds, so a hung look cannot keep a relay ready.
    """

    def __init__(
        self, dsn: str, loops: Sequence[DestinationLoop], stopping: threading.Event, *, look: float = LOOK_SECONDS
    ) -> None:
        self._dsn = dsn
        self._loops = list(loops)
        self._stopping = stopping
        self._look_seconds = look
        self.stale = 3 * look + 2 * ANSWER_SECONDS + BROKER_SECONDS * len(self._loops)
        self._ended = threading.Event()
        self._database = (DatabaseState.UNKNOWN, 0.0)
        self._brokers: dict[str, tuple[BrokerState, float]] = {}
        self._oldest: tuple[dict[str, float | None], float] = ({}, 0.0)
        self._thread = threading.Thread(target=self._run, name="relay-watch", daemon=True)

    def start(self) -> None:
        """Begins to look; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end and waits for a look under way, at most a few seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2)

    def moving(self, stalled: float) -> bool:
        """True while every loop took a step within the last `stalled` seconds; depends on nothing outside this process."""
        now = time.monotonic()
        return all(now - loop.progressed_at < stalled for loop in self._loops)

    def oldest(self, destination: str) -> float | None:
        """Age of the oldest unsent event as last seen; None when that is not known, 0 when nothing waits."""
        ages, at = self._oldest
        if destination not in ages or time.monotonic() - at > self.stale:
            return None
        return ages[destination] or 0.0

    def report(self) -> Report:
        """How everything stands, from what was last seen."""
        database = self._database[0] if self._fresh(self._database[1]) else DatabaseState.UNKNOWN
        found: dict[str, DestinationReport] = {}
        for loop in self._loops:
            name = loop.destination.name
            if isinstance(loop.destination, Destination):
                found[name] = DestinationReport(
                    self._broker(name),
                    loop.leased,
                    loop.slots_held,
                    loop.in_flight,
                    self.oldest(name),
                    loop.counters.trouble,
                )
        return Report(self._state(database, list(found.values())), database, found)

    def _state(self, database: DatabaseState, destinations: list[DestinationReport]) -> State:
        if self._stopping.is_set():
            return State.DRAINING
        if database is DatabaseState.DISARMED:
            return State.DISARMED
        if database is not DatabaseState.READY:
            return State.DATABASE
        if any(d.broker is not BrokerState.CONNECTED for d in destinations):
            return State.BROKER
        if not all(d.leased for d in destinations):
            return State.NO_LEASE
        return State.READY

    def _broker(self, name: str) -> BrokerState:
        state, at = self._brokers.get(name, (BrokerState.UNKNOWN, 0.0))
        return state if self._fresh(at) else BrokerState.UNKNOWN

    def _fresh(self, at: float) -> bool:
        return time.monotonic() - at <= self.stale

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        conn: Punctual[Any] | None = None
        while not self._ended.is_set():
            try:
                if conn is None or conn.closed:
                    conn = connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS)
                state = self._look(conn)
            except (psycopg.Error, FencepostError) as error:
                state = refused(error)
            except Exception as error:  # noqa: BLE001 - a watch that ended would make a good relay unready for ever
                log.error("looking at the database failed: %s", type(error).__name__)
                state = DatabaseState.UNKNOWN
            self._database = (state, time.monotonic())
            for loop in self._loops:
                if isinstance(loop.destination, Destination) and not self._ended.is_set():
                    self._brokers[loop.destination.name] = (self._ask(loop.destination), time.monotonic())
            self._ended.wait(self._look_seconds)
        if conn is not None:
            conn.close()

    def _look(self, conn: Punctual[Any]) -> DatabaseState:
        state = looked(conn)
        self._oldest = (oldest(conn), time.monotonic())
        return state

    def _ask(self, destination: Destination) -> BrokerState:
        if not destination.opened:
            return BrokerState.CONNECTING
        try:
            answers = destination.answers(time.monotonic() + BROKER_SECONDS)
        except Exception as error:  # noqa: BLE001 - a client's surprise is no reason to stop looking
            log.error("asking the broker of %s failed: %s", destination.name, type(error).__name__)
            return BrokerState.UNKNOWN
        return BrokerState.CONNECTED if answers else BrokerState.UNREACHABLE
