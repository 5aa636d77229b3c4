"""A relay in parts and as a whole for tests, over a broker in memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, LiteralString
from uuid import uuid4

import psycopg

from fencepost.relay import outbox
from fencepost.relay.delivery import Settled
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Counters, Pace
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import Publisher, Route
from fencepost.relay.slots import SlotLease
from fencepost.schemas.event import Event
from support.database import Database
from support.processes import wait_for

BRISK = Pace(
    lease=4.0, refresh=0.1, confirm=1.0, poll_min=0.002, poll_max=0.02, drain=2.0, retry=RetryPolicy(base=0.05, cap=0.1)
)
EVERYTHING = (Route("*", "anywhere"),)
# No promise of ours: how long a test waits for a state before it gives up, on a machine that does other things as well.
WITHIN_SECONDS = 60.0
AGED: LiteralString = """
UPDATE fencepost.relay SET lease_until = clock_timestamp() - interval '1 ms' WHERE owner = %(owner)s"""
UNACKED: LiteralString = """
SELECT count(*) FROM fencepost.outbox o WHERE NOT EXISTS (
    SELECT FROM fencepost.ack a JOIN fencepost.tick t ON t.era = a.era AND t.n = a.acked_tick
    WHERE a.destination = %(destination)s AND a.slot = o.slot AND pg_visible_in_snapshot(o.xid, t.snap) AND o.seq <= t.hint)"""


class Changed(Event, type="relay.changed", version=1):
    """What tests of the relay accept."""

    note: str = ""


class Other(Event, type="other.thing", version=1):
    """An event of another type."""


def accept(
    conn: psycopg.Connection[Any], *operations: str, key: str = "", tenant: str = "acme", serialize: bool = False
) -> None:
    """Accepts one event for each operation in the caller's transaction."""
    for operation in operations:
        event = Changed(tenant=tenant, operation=operation, ordering_key=key or operation)
        outbox.enqueue(conn, event, serialize=serialize)


def accepted(database: Database, *operations: str, key: str = "", tenant: str = "acme") -> None:
    """Accepts the events, each in a transaction of its own."""
    with database.connect() as conn:
        for operation in operations:
            accept(conn, operation, key=key, tenant=tenant)
            conn.commit()


def destination(broker: Publisher, name: str = "memory", routes: Sequence[Route] = EVERYTHING) -> Destination:
    """A destination whose broker is this publisher."""
    return Destination(name, "kafka", routes, lambda _: broker)


def loop(
    database: Database, to: Destination | NoRoute, *, pace: Pace = BRISK, stop: threading.Event | None = None
) -> DestinationLoop:
    """A loop that has not begun."""
    return DestinationLoop(database.dsn, to, pace=pace, stop=stop or threading.Event())


def relay_once(database: Database, to: Destination | NoRoute, *, pace: Pace = BRISK) -> Counters:
    """Publishes or parks everything that is committed, then leaves."""
    made = loop(database, to, pace=pace)
    made.run(once=True)
    return made.counters


@contextlib.contextmanager
def relaying(database: Database, to: Destination | NoRoute, *, pace: Pace = BRISK) -> Generator[DestinationLoop]:
    """A loop at work in a thread; what ended it unexpectedly is raised at the end."""
    stop = threading.Event()
    made = loop(database, to, pace=pace, stop=stop)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive(), "the loop did not end"
    if failed:
        raise failed[0]


def owner_of(database: Database, name: str = "memory", *, seconds: float = 30.0) -> SlotLease:
    """One more relay's lease on a registered destination; nothing is leased yet."""
    return SlotLease(name, uuid4(), seconds=seconds)


def registered(database: Database, name: str = "memory") -> None:
    """A destination that takes everything."""
    with database.connect(autocommit=True) as conn:
        Destination(name, "kafka", EVERYTHING, _never).register(conn)


def expire(conn: psycopg.Connection[Any], lease: SlotLease) -> None:
    """Makes the database see this relay's lease as over."""
    conn.execute(AGED, {"owner": lease.owner})


def value(conn: psycopg.Connection[Any], query: LiteralString) -> Any:
    """The only value of a query."""
    row = conn.execute(query).fetchone()
    assert row is not None
    return row[0]


def unacked(database: Database, destination: str) -> int:
    """How many events no relay has recorded as published or parked there."""
    with database.connect(autocommit=True) as conn:
        row = conn.execute(UNACKED, {"destination": destination}).fetchone()
    assert row is not None
    return int(row[0])


def until(conn: psycopg.Connection[Any], query: LiteralString, within: float = WITHIN_SECONDS) -> None:
    """Waits until the query's only value is true."""
    wait_for(lambda: value(conn, query) is True, within, query)


def arrived(found: Callable[[], Sequence[str]], count: int, within: float = WITHIN_SECONDS) -> list[str]:
    """What has arrived, once there are this many."""
    return wait_for(lambda: list(found()) if len(found()) >= count else None, within, f"{count} arrivals")


def _never(source: str) -> Publisher:
    raise AssertionError("registered only")


__all__ = [
    "BRISK",
    "EVERYTHING",
    "Changed",
    "Other",
    "Settled",
    "accept",
    "accepted",
    "arrived",
    "destination",
    "expire",
    "loop",
    "owner_of",
    "registered",
    "relay_once",
    "relaying",
    "until",
    "value",
]
