"""What was accepted or scheduled, asserted inside the caller's transaction, committed or not yet.

A failure tells types and identities of what was found and which fields differ, never a value out of a payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar
from uuid import UUID

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

from fencepost.schemas import content
from fencepost.schemas.errors import InvalidInput, Undecodable
from fencepost.schemas.event import Event
from fencepost.schemas.identity import as_class
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async

__all__ = ["Submitted", "assert_enqueued", "assert_enqueued_async", "assert_submitted", "assert_submitted_async"]

LINES_MAX = 20

EVENTS: LiteralString = """
SELECT o.event_id, o.tenant, o.operation, o.type, o.version, o.ordering_key,
       CASE WHEN o.type = %(type)s AND o.version = %(version)s THEN o.payload END
FROM fencepost.outbox AS o ORDER BY o.seq"""
JOBS: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec, j.priority, CASE WHEN j.class = %(class)s THEN j.args END
FROM fencepost.job AS j ORDER BY j.submitted_at, j.tenant, j.operation"""

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row of the outbox as `Event.parse` takes it."""

    id: UUID
    tenant: str
    operation: str
    type: str
    version: int
    ordering_key: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job as it was submitted, and the state of its execution (queued, running, done, ...)."""

    tenant: str
    operation: str
    job_class: str
    state: str
    priority: int
    args: bytes

    def json(self) -> content.JsonObject:
        """The args."""
        return content.decode(self.args)


def assert_enqueued(tx: Transaction, event: type[E], /, *, times: int = 1, **fields: object) -> list[E]:
    """Exactly ``times`` events of this type and version with these fields are in the outbox; returns them in order.

    ``tx`` is whatever `enqueue` takes. ``fields`` are compared with the event's own, tenant, operation and ordering_key among them. Sees what the caller's
    open transaction has enqueued, and events that were published and not yet recycled. Raises AssertionError, or
    InvalidInput for a field that the event does not have.
    """
    __tracebackhide__ = True
    _require_fields(event, fields)
    with _behind(tx).cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(EVENTS, _wanted(event)).fetchall()
    return _enqueued(rows, event, times, fields)


async def assert_enqueued_async(
    tx: AsyncTransaction, event: type[E], /, *, times: int = 1, **fields: object
) -> list[E]:
    """As `assert_enqueued`, for asyncio."""
    __tracebackhide__ = True
    _require_fields(event, fields)
    async with (await _behind_async(tx)).cursor(row_factory=tuple_row) as cursor:
        rows = await (await cursor.execute(EVENTS, _wanted(event))).fetchall()
    return _enqueued(rows, event, times, fields)


def assert_submitted(
    tx: Transaction,
    job_class: str,
    /,
    *,
    times: int = 1,
    tenant: str | None = None,
    operation: str | None = None,
    **args: object,
) -> list[Submitted]:
    """Exactly ``times`` jobs of this class with these identities and args were submitted; returns them in order.

    ``args`` are compared with the members of the job's args as JSON, private ones apart. Sees what the caller's open
    transaction has submitted. Raises AssertionError.
    """
    __tracebackhide__ = True
    with _behind(tx).cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(JOBS, {"class": as_class(job_class)}).fetchall()
    return _submitted(rows, job_class, times, tenant, operation, args)


async def assert_submitted_async(
    tx: AsyncTransaction,
    job_class: str,
    /,
    *,
    times: int = 1,
    tenant: str | None = None,
    operation: str | None = None,
    **args: object,
) -> list[Submitted]:
    """As `assert_submitted`, for asyncio."""
    __tracebackhide__ = True
    async with (await _behind_async(tx)).cursor(row_factory=tuple_row) as cursor:
        rows = await (await cursor.execute(JOBS, {"class": as_class(job_class)})).fetchall()
    return _submitted(rows, job_class, times, tenant, operation, args)


def _behind(tx: Transaction) -> Connection[Any]:
    """psycopg's connection behind what the caller has; to look needs no open transaction."""
    given: Any = tx
    found: Connection[Any] = given if isinstance(tx, Connection) else connection_of(tx)
    return found


async def _behind_async(tx: AsyncTransaction) -> AsyncConnection[Any]:
    given: Any = tx
    found: AsyncConnection[Any] = given if isinstance(tx, AsyncConnection) else await connection_of_async(tx)
    return found


def _wanted(event: type[Event]) -> dict[str, object]:
    return {"type": event.event_type, "version": event.event_version}


def _require_fields(event: type[Event], fields: Mapping[str, object]) -> None:
    for name in fields:
        if name not in event.model_fields:
            raise InvalidInput(
                f"{event.__name__} has no such field", field=name, hint=f"one of: {', '.join(event.model_fields)}"
            )


def _enqueued(rows: Sequence[tuple[Any, ...]], event: type[E], times: int, fields: Mapping[str, object]) -> list[E]:
    __tracebackhide__ = True
    found: list[E] = []
    lines: list[str] = []
    for event_id, tenant, operation, type_, version, ordering_key, payload in rows:
        line = f"{type_}.v{version} tenant {tenant!r}, operation {operation!r}"
        if payload is not None:
            stored = _Stored(event_id, tenant, operation, type_, version, ordering_key, bytes(payload))
            try:
                parsed = event.parse(stored)
            except Undecodable as error:
                lines.append(f"{line}: not readable as {event.__name__} ({error.reason}: {error.field})")
                continue
            differs = [name for name, value in fields.items() if getattr(parsed, name) != value]
            if not differs:
                found.append(parsed)
            line += f": other {', '.join(differs)}" if differs else ": as expected"
        lines.append(line)
    if len(found) != times:
        what = f"{event.event_type}.v{event.event_version}"
        raise AssertionError(_told("the outbox", what, [*fields], times, len(found), lines))
    return found


def _submitted(
    rows: Sequence[tuple[Any, ...]],
    job_class: str,
    times: int,
    tenant: str | None,
    operation: str | None,
    args: Mapping[str, object],
) -> list[Submitted]:
    __tracebackhide__ = True
    identity = {n: v for n, v in (("tenant", tenant), ("operation", operation)) if v is not None}
    found: list[Submitted] = []
    lines: list[str] = []
    for stored_tenant, stored_operation, stored_class, state, priority, raw in rows:
        line = f"{stored_class} tenant {stored_tenant!r}, operation {stored_operation!r}, {state}"
        if raw is not None:
            job = Submitted(stored_tenant, stored_operation, stored_class, state, priority, bytes(raw))
            members = job.json()
            differs = [n for n, v in identity.items() if getattr(job, n) != v]
            differs += [n for n, v in args.items() if n not in members or members[n] != v]
            if not differs:
                found.append(job)
            line += f": other {', '.join(differs)}" if differs else ": as expected"
        lines.append(line)
    if len(found) != times:
        raise AssertionError(_told("the jobs", job_class, [*identity, *args], times, len(found), lines))
    return found


def _told(where: str, what: str, names: list[str], times: int, found: int, lines: list[str]) -> str:
    by = f" with the given {', '.join(names)}" if names else ""
    shown = [f"  {line}" for line in lines[:LINES_MAX]] or ["  nothing"]
    if len(lines) > LINES_MAX:
        shown.append(f"  and {len(lines) - LINES_MAX} more")
    return "\n".join([f"expected {times} of {what}{by}, found {found}; in {where}:", *shown])
