"""Hand-over to jobs: the work is scheduled in the same commit as the reservation and the domain change, or not at all.

Calls the database function ``fencepost.submit`` and nothing else: who executes the job is not known here.
The arguments of a job made from an event are the event's content, private members included; the meaning of the job
is bound to the content without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, LiteralString, overload
from uuid import UUID

from psycopg.rows import tuple_row

from fencepost.schemas import content
from fencepost.schemas.content import JsonValue
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.event import Event
from fencepost.schemas.identity import as_class, as_operation, as_tenant
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async

__all__ = ["submit", "submit_async"]

SUBMIT: LiteralString = """
SELECT fencepost.submit(
    %(tenant)s, %(operation)s, %(job_class)s, %(args)s::bytea, %(binding)s, %(source_event)s::uuid,
    %(run_at)s::timestamptz, %(priority)s::integer)
"""

PRIORITY_MAX = 2**31 - 1


@overload
def submit(
    tx: Transaction,
    job_class: str,
    args: Event,
    *,
    operation: str | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool: ...
@overload
def submit(
    tx: Transaction,
    job_class: str,
    args: Mapping[str, JsonValue],
    *,
    tenant: str,
    operation: str,
    source_event: UUID | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool: ...
def submit(
    tx: Transaction,
    job_class: str,
    args: Event | Mapping[str, JsonValue],
    *,
    tenant: str | None = None,
    operation: str | None = None,
    source_event: UUID | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool:
    """Schedules a job in the caller's transaction, and never commits; False when the same job was there already.

    ``tx`` is a connection of psycopg, a connection or session of SQLAlchemy (or SQLModel) on psycopg, or Django's
    connection inside ``atomic()``; nothing of it is flushed.
    ``args`` is an event (tenant, operation and source are taken from it; give ``operation`` to make several jobs of
    one class from one event), or a JSON object together with ``tenant`` and ``operation``. The job may be claimed from
    ``run_at`` on, higher ``priority`` first. Raises OperationConflict when the operation has a job of this class with
    another meaning, InvalidInput naming the field, WrongTransaction outside a transaction.
    """
    values = _values(job_class, args, tenant, operation, source_event, run_at, priority)
    with connection_of(tx).cursor(row_factory=tuple_row) as cursor:
        return _created(cursor.execute(SUBMIT, values).fetchone())


@overload
async def submit_async(
    tx: AsyncTransaction,
    job_class: str,
    args: Event,
    *,
    operation: str | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool: ...
@overload
async def submit_async(
    tx: AsyncTransaction,
    job_class: str,
    args: Mapping[str, JsonValue],
    *,
    tenant: str,
    operation: str,
    source_event: UUID | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool: ...
async def submit_async(
    tx: AsyncTransaction,
    job_class: str,
    args: Event | Mapping[str, JsonValue],
    *,
    tenant: str | None = None,
    operation: str | None = None,
    source_event: UUID | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
) -> bool:
    """As `submit`, for asyncio."""
    values = _values(job_class, args, tenant, operation, source_event, run_at, priority)
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        return _created(await (await cursor.execute(SUBMIT, values)).fetchone())


def _values(
    job_class: str,
    args: Event | Mapping[str, JsonValue],
    tenant: str | None,
    operation: str | None,
    source_event: UUID | None,
    run_at: datetime | None,
    priority: int,
) -> dict[str, object]:
    if isinstance(args, Event):
        if tenant is not None and tenant != args.tenant:
            raise InvalidInput("the job would belong to another tenant than its event", field="tenant")
        tenant, operation = args.tenant, args.operation if operation is None else operation
        source_event = args.event_id if source_event is None else source_event
        raw = args.payload()
    else:
        raw = content.encode(dict(args))
    if tenant is None or operation is None:
        raise InvalidInput(
            "args without an event need tenant and operation", field="tenant" if tenant is None else "operation"
        )
    if run_at is not None and run_at.utcoffset() is None:
        raise InvalidInput("run_at has no time zone", field="run_at", hint="for example datetime.now(UTC)")
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidInput(f"priority must be a whole number within ±{PRIORITY_MAX}", field="priority")
    return {
        "tenant": as_tenant(tenant),
        "operation": as_operation(operation),
        "job_class": as_class(job_class),
        "args": raw,
        "binding": content.binding(raw),
        "source_event": source_event,
        "run_at": run_at,
        "priority": priority,
    }


def _created(row: tuple[Any, ...] | None) -> bool:
    assert row is not None
    return bool(row[0])
