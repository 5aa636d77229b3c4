"""`fencepost status`: what is in every state, how old, and how far the relay is; never a payload."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, LiteralString

import psycopg
import typer
from psycopg import Connection
from psycopg.rows import class_row

from fencepost.operate import printing, settings
from fencepost.relay.backlog import COUNT_MAX, backlog
from fencepost.schemas.contract import connect

__all__ = ["STATES", "State", "backlog", "relays", "states", "status"]

ARMED: LiteralString = "SELECT fencepost.armed()"
STATES: LiteralString = """
SELECT axis, state, tenant, kind, reason, count, oldest, attempts,
       extract(epoch FROM clock_timestamp() - oldest)::float AS age_seconds
FROM fencepost.status ORDER BY axis, state, tenant, kind, reason"""
RELAYS: LiteralString = """
SELECT r.destination, count(*) FROM fencepost.relay AS r WHERE r.lease_until > clock_timestamp() GROUP BY r.destination"""
UNROUTED: LiteralString = """
SELECT count(*) FROM (SELECT FROM fencepost.outbox LIMIT %(most)s) AS o
WHERE NOT EXISTS (SELECT FROM fencepost.destination)"""


@dataclass(frozen=True, slots=True)
class State:
    """One group of things in one state; `oldest` by the database clock."""

    axis: str
    state: str
    tenant: str
    kind: str
    reason: str
    count: int
    oldest: datetime | None
    attempts: int | None
    age_seconds: float | None


def states(conn: Connection[Any]) -> list[State]:
    """Every state with its count, oldest age and attempts; needs the reader role."""
    with conn.cursor(row_factory=class_row(State)) as cursor:
        return cursor.execute(STATES).fetchall()


def relays(conn: Connection[Any]) -> dict[str, int] | None:
    """How many relays hold a lease on each destination now; None where this login may not look."""
    try:
        return {str(name): int(number) for name, number in conn.execute(RELAYS)}
    except psycopg.errors.InsufficientPrivilege:
        return None


def waiting_for_a_destination(conn: Connection[Any]) -> int:
    """Events that wait because no relay has registered a destination yet; counted up to the limit."""
    try:
        row = conn.execute(UNROUTED, {"most": COUNT_MAX}).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return 0
    return 0 if row is None else int(row[0])


def status(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What is in every state: count, oldest age, attempts and reason, by tenant and class; and the relay's backlog."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        row = conn.execute(ARMED).fetchone()
        armed = bool(row and row[0])
        found, waiting, unrouted = states(conn), backlog(conn), waiting_for_a_destination(conn)
        live = relays(conn)
    if as_json:
        printing.as_json(
            {
                "armed": armed,
                "states": [asdict(s) for s in found],
                "backlog": None if waiting is None else [asdict(b) for b in waiting],
                "relays": live,
                "waiting_for_a_destination": unrouted,
            }
        )
        return
    printing.say("armed" if armed else "DISARMED: nothing is published, claimed or dispatched; run `fencepost doctor`")
    show_states(found)
    if waiting is None:
        printing.say("relay: the backlog needs a login with the relay role")
    else:
        rows = [
            (
                b.destination,
                b.kind,
                b.unsent,
                _age(b.oldest_seconds),
                None if live is None else live.get(b.destination, 0),
            )
            for b in waiting
        ]
        columns = ("destination", "kind", "unsent", "oldest", "relays")
        printing.table("relay", columns, rows, empty="no destination is registered yet; start `fencepost relay run`")
        if unrouted:
            printing.say(
                f"relay: {'>= ' if unrouted >= COUNT_MAX else ''}{unrouted} events wait for a first destination"
            )


def show_states(found: list[State]) -> None:
    """The table of states."""
    rows = [
        (s.axis, s.state, s.tenant or None, s.kind, s.reason or None, s.count, _age(s.age_seconds), s.attempts or None)
        for s in found
    ]
    columns = ("axis", "state", "tenant", "kind", "reason", "count", "oldest", "attempts")
    printing.table("states", columns, rows, empty="nothing yet")


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else printing.age(seconds)
