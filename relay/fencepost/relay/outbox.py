"""Acceptance: the domain change and its event commit in one transaction, or neither does."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString, cast, overload
from uuid import UUID

from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from fencepost.schemas.content import binding, reference_binding
from fencepost.schemas.envelope import validate_attributes, validate_size
from fencepost.schemas.event import Event
from fencepost.schemas.identity import uuid7
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async, is_async

ENQUEUE: LiteralString = """
SELECT event_id, created FROM fencepost.enqueue(
    %(event_id)s, %(tenant)s, %(operation)s, %(type)s, %(version)s, %(ordering_key)s, %(binding)s,
    'application/json', %(attributes)s, %(payload)s, %(serialize)s)"""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The event's identity; `created` is False when this operation and type was accepted before with this meaning."""

    event_id: UUID
    created: bool


@overload
def enqueue(
    tx: Transaction,
    event: Event,
    *,
    attributes: Mapping[str, str] | None = None,
    reference: str | None = None,
    serialize: bool = False,
) -> Accepted: ...
@overload
def enqueue(
    tx: AsyncTransaction,
    event: Event,
    *,
    attributes: Mapping[str, str] | None = None,
    reference: str | None = None,
    serialize: bool = False,
) -> Awaitable[Accepted]: ...
def enqueue(
    tx: Transaction | AsyncTransaction,
    event: Event,
    *,
    attributes: Mapping[str, str] | None = None,
    reference: str | None = None,
    serialize: bool = False,
) -> Accepted | Awaitable[Accepted]:
    """Accepts an event in the caller's transaction: it commits with the domain change or not at all.

    `tx` is a connection of psycopg, a connection or session of SQLAlchemy (or SQLModel) on psycopg, or Django's connection inside
    `atomic()`; with one for asyncio the result is awaited. Never commits, rolls back, flushes or changes the session.
    `attributes` are CloudEvents extension attributes (strings). `reference` is an immutable name of the material content,
    where the domain has one; the digest then binds it instead of the payload. `serialize` makes writers of one ordering key take
    turns until they commit, so that their events keep commit order without a row lock of their own; that, or `session.flush()` before
    this call, is needed where the row lock that orders the writers is still pending in an ORM session.

    Raises `WrongTransaction` on an autocommit connection outside a transaction and on other drivers, `OperationConflict` when the operation
    and type were accepted with another meaning (the transaction is then aborted by PostgreSQL), `InvalidInput` naming
    the field before anything is written.
    """
    parameters = _parameters(event, attributes, reference, serialize)
    if is_async(tx):
        return _enqueue_async(cast(AsyncTransaction, tx), parameters)
    with connection_of(cast(Transaction, tx)).cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(ENQUEUE, parameters).fetchone()
    return _accepted(row)


async def _enqueue_async(tx: AsyncTransaction, parameters: dict[str, Any]) -> Accepted:
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(ENQUEUE, parameters)
        row = await cursor.fetchone()
    return _accepted(row)


def _parameters(
    event: Event, attributes: Mapping[str, str] | None, reference: str | None, serialize: bool
) -> dict[str, Any]:
    payload = event.payload()
    checked = validate_attributes(attributes or {})
    validate_size(payload, checked)
    return {
        "event_id": uuid7(),
        "tenant": event.tenant,
        "operation": event.operation,
        "type": type(event).event_type,
        "version": type(event).event_version,
        "ordering_key": event.ordering_key,
        "binding": binding(payload) if reference is None else reference_binding(reference),
        "attributes": Jsonb(checked) if checked else None,
        "payload": payload,
        "serialize": serialize,
    }


def _accepted(row: tuple[Any, ...] | None) -> Accepted:
    assert row is not None
    return Accepted(row[0], row[1])
