"""`fencepost relay check`: everything that `relay run` will need, looked at without sending or changing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from fencepost.operate import contract_checks
from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.operate.publishers import maker_of
from fencepost.operate.refusals import line_of
from fencepost.operate.settings import DestinationSettings
from fencepost.relay.destination import Destination, as_stored, source
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Inspectable, Place
from fencepost.schemas.connect import address, connect
from fencepost.schemas.errors import ConfigError, FencepostError

__all__ = ["examine"]

# The outbox takes no larger payload.
PAYLOAD_BYTES = 1_048_576
ARMED: LiteralString = "SELECT fencepost.armed()"
REGISTERED: LiteralString = """
SELECT kind, routes, on_refusal FROM fencepost.destination WHERE destination = %(destination)s"""
# What the relay's login must be able to do; a superuser of a single-role installation can do everything.
ABLE: LiteralString = """
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'fencepost'::regnamespace
  AND p.proname IN ('tick', 'lease_slots', 'release_slots', 'ack', 'register_destination')
  AND NOT has_function_privilege(p.oid, 'EXECUTE')
ORDER BY p.proname"""


def examine(
    dsn: str, destinations: Sequence[DestinationSettings], pace: Pace, *, doorbell: bool = False
) -> Iterator[Finding]:
    """One finding for each thing, in the order in which the relay would meet it; nothing is sent or written."""
    made: list[Destination] = []
    for d in destinations:
        name = f"settings {d.name}"
        try:
            made.append(maker_of(d, pace, False)())
            yield ok(name, f"{d.kind}, {_count(len(d.routes), 'route')}")
        except ConfigError as error:
            yield fail(name, line_of(error))
    if not destinations:
        yield fail("settings", "there is no destination; configure [[destinations]] or FENCEPOST_DESTINATIONS")
    origin: str | None = None
    try:
        with connect(dsn, autocommit=True, answer_within=pace.answer) as conn:
            yield ok("database", f"{address(dsn)} answers")
            missing = contract_checks.installed(conn)
            if missing is not None:
                yield missing
            else:
                origin = _told(conn)
                yield from _database(conn, made)
                if doorbell:
                    yield contract_checks.doorbell(conn, dsn, pace.answer)
    except (FencepostError, psycopg.Error) as error:
        yield fail("database", line_of(error))
    for destination in made:
        yield from _broker(destination, origin or "urn:fencepost:check", pace)


def _told(conn: Connection[Any]) -> str | None:
    try:
        return source(conn)
    except psycopg.errors.InsufficientPrivilege:
        return None


def _database(conn: Connection[Any], destinations: Sequence[Destination]) -> Iterator[Finding]:
    yield _looked(conn, contract_checks.migrations, "migrations")
    yield _looked(conn, _privileges, "privileges")
    yield _looked(conn, _armed, "armed")
    for destination in destinations:
        yield _looked(conn, partial(_routes, destination=destination), f"routes {destination.name}")


def _looked(conn: Connection[Any], look: Callable[[Connection[Any]], Finding], name: str) -> Finding:
    try:
        return look(conn)
    except psycopg.errors.InsufficientPrivilege:
        return warn(name, "this login may not look; the relay itself needs the relay role")


def _privileges(conn: Connection[Any]) -> Finding:
    missing = [str(name) for (name,) in conn.execute(ABLE)]
    if missing:
        return fail("privileges", f"this login may not execute {', '.join(missing)}; grant it the relay role")
    return ok("privileges", "this login may do what a relay does")


def _armed(conn: Connection[Any]) -> Finding:
    row = conn.execute(ARMED).fetchone()
    if row is not None and row[0] is True:
        return ok("armed", "this database may publish")
    return fail("armed", "DISARMED: the relay would publish nothing; run `fencepost doctor`")


def _routes(conn: Connection[Any], destination: Destination) -> Finding:
    name = f"routes {destination.name}"
    row = conn.execute(REGISTERED, {"destination": destination.name}).fetchone()
    if row is None:
        return ok(name, "not registered yet; the first relay does that")
    if row[0] != destination.kind:
        return fail(name, f"registered as {row[0]}; start one relay with --accept-routes, or choose another name")
    if row[1] != as_stored(destination.routes):
        return fail(name, "other routes are registered; start one relay with --accept-routes once all have these")
    if row[2] != destination.on_refusal:
        return fail(
            name,
            f"registered with on_refusal {row[2]}, the settings say {destination.on_refusal};"
            " start one relay with --accept-routes once all have these",
        )
    return ok(name, "as registered")


def _broker(destination: Destination, origin: str, pace: Pace) -> Iterator[Finding]:
    name = f"broker {destination.name}"
    try:
        publisher = destination.make(origin)
        publisher.open(time.monotonic() + pace.confirm)
    except (FencepostError, OSError) as error:
        yield fail(name, line_of(error))
        return
    try:
        yield ok(name, f"{destination.kind} answers")
        if not isinstance(publisher, Inspectable):
            yield warn(f"places {destination.name}", "this publisher cannot look without sending")
            return
        wanted = sorted({route.to for route in destination.routes})
        for to, place in publisher.inspect(wanted, time.monotonic() + pace.confirm).items():
            yield _place(f"{destination.name} {to or '(default exchange)'}", place)
    except FencepostError as error:
        yield fail(name, line_of(error))
    finally:
        publisher.close(time.monotonic())


def _place(name: str, place: Place) -> Finding:
    if place.reason is not None:
        return fail(name, f"{place.reason.value}: every event sent there would be parked; create it or grant the right")
    if place.max_bytes is None:
        return ok(name, "exists; its largest message is not told to this login")
    if place.max_bytes < PAYLOAD_BYTES:
        return warn(
            name, f"takes {place.max_bytes} bytes, events may have {PAYLOAD_BYTES}: larger ones would be parked"
        )
    return ok(name, f"exists and takes {place.max_bytes} bytes")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
