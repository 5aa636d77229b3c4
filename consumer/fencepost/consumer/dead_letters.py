"""Dead letters: a delivery that cannot be handled is kept whole, once, with a typed reason, and its queue goes on.

Conflicts are kept by the reservation itself, with both meanings. The rows are the record; the broker's copy may go.
"""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg import AsyncConnection, Connection
from psycopg.types.json import Jsonb

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.outcomes import Handled, Outcome
from fencepost.consumer.retries import settle, settle_async
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import FencepostError, FromDatabase, Undecodable
from fencepost.schemas.transaction import driver_error

__all__ = ["describe", "handler_failed", "handler_failed_async", "undecodable", "undecodable_async"]

DEAD_LETTER: LiteralString = """
SELECT fencepost.dead_letter(
    %(consumer)s, %(coordinates)s, %(reason)s, %(field)s, %(detail)s, %(tenant)s, %(operation)s, %(type)s,
    %(version)s::integer, %(event_id)s::uuid, %(attempts)s::integer, %(headers)s::jsonb, %(payload)s::bytea,
    %(meaning)s::bytea)
"""


def undecodable(tx: Connection[Any], consumer: str, delivery: Delivery, error: Undecodable) -> Handled:
    """Keeps a delivery that cannot be read, in the caller's transaction; again is the same row, counted."""
    envelope = _envelope(delivery)
    _keep(tx, consumer, delivery, _undecodable(consumer, delivery, envelope, error))
    return _handled(Outcome.UNDECODABLE, delivery, envelope, error.reason, error.field)


async def undecodable_async(tx: AsyncConnection[Any], consumer: str, delivery: Delivery, error: Undecodable) -> Handled:
    """As `undecodable`, for asyncio."""
    envelope = _envelope(delivery)
    await _keep_async(tx, consumer, delivery, _undecodable(consumer, delivery, envelope, error))
    return _handled(Outcome.UNDECODABLE, delivery, envelope, error.reason, error.field)


def handler_failed(
    tx: Connection[Any], consumer: str, delivery: Delivery, error: BaseException, attempts: int
) -> Handled:
    """Keeps a delivery whose handler failed ``attempts`` times, in the caller's transaction."""
    envelope = _envelope(delivery)
    _keep(tx, consumer, delivery, _failed(consumer, delivery, envelope, error, attempts))
    return _handled(Outcome.HANDLER_FAILED, delivery, envelope, type(error).__name__, None)


async def handler_failed_async(
    tx: AsyncConnection[Any], consumer: str, delivery: Delivery, error: BaseException, attempts: int
) -> Handled:
    """As `handler_failed`, for asyncio."""
    envelope = _envelope(delivery)
    await _keep_async(tx, consumer, delivery, _failed(consumer, delivery, envelope, error, attempts))
    return _handled(Outcome.HANDLER_FAILED, delivery, envelope, type(error).__name__, None)


def describe(error: BaseException) -> str:
    """What may be told of an error: its class, and SQLSTATE, constraint, reason or field where it has them.

    Never its message, which may quote a payload or a row.
    """
    parts = [type(error).__name__]
    if (driver := driver_error(error)) is not None:
        parts.extend(part for part in (driver.sqlstate, driver.diag.constraint_name) if part)
    if isinstance(error, Undecodable):
        parts.append(error.reason)
    if isinstance(error, FencepostError) and error.field:
        parts.append(error.field)
    if isinstance(error, FencepostError) and not isinstance(error, FromDatabase | Undecodable):
        parts.append(error.message)
    return " ".join(parts)


def _keep(tx: Connection[Any], consumer: str, delivery: Delivery, values: dict[str, object]) -> None:
    tx.execute(DEAD_LETTER, values)
    if delivery.dead_letter is not None:
        settle(tx, consumer, delivery.dead_letter, gone=False)


async def _keep_async(tx: AsyncConnection[Any], consumer: str, delivery: Delivery, values: dict[str, object]) -> None:
    await tx.execute(DEAD_LETTER, values)
    if delivery.dead_letter is not None:
        await settle_async(tx, consumer, delivery.dead_letter, gone=False)


def _undecodable(consumer: str, delivery: Delivery, envelope: Envelope | None, error: Undecodable) -> dict[str, object]:
    # A type or version that this consumer does not know yet is no fault of the event: an upgrade makes it readable.
    reason = error.reason if error.reason in ("unknown_type", "newer_version") else "undecodable"
    return _values(consumer, delivery, envelope, reason, error.field, error.reason, 1)


def _failed(
    consumer: str, delivery: Delivery, envelope: Envelope | None, error: BaseException, attempts: int
) -> dict[str, object]:
    return _values(consumer, delivery, envelope, "handler_failed", None, describe(error), attempts)


def _values(
    consumer: str,
    delivery: Delivery,
    envelope: Envelope | None,
    reason: str,
    field: str | None,
    detail: str,
    attempts: int,
) -> dict[str, object]:
    return {
        "consumer": consumer,
        "coordinates": delivery.coordinates,
        "reason": reason,
        "field": field,
        "detail": detail,
        "tenant": envelope and envelope.tenant,
        "operation": envelope and envelope.operation,
        "type": envelope and envelope.type,
        "version": envelope and envelope.version,
        "event_id": envelope and envelope.id,
        "attempts": attempts,
        "headers": Jsonb(delivery.stored_headers()),
        "payload": delivery.body,
        "meaning": envelope and _meaning(envelope),
    }


def _meaning(envelope: Envelope) -> bytes | None:
    try:
        return envelope.meaning.raw
    except Undecodable:
        return None


def _envelope(delivery: Delivery) -> Envelope | None:
    """The envelope as far as it can be read: an undecodable content still has an identity."""
    try:
        return delivery.envelope()
    except Undecodable:
        return None


def _handled(
    outcome: Outcome, delivery: Delivery, envelope: Envelope | None, reason: str, field: str | None
) -> Handled:
    if envelope is None:
        return Handled(outcome, delivery.coordinates, reason=reason, field=field)
    return Handled(
        outcome,
        delivery.coordinates,
        tenant=envelope.tenant,
        operation=envelope.operation,
        type=envelope.type,
        version=envelope.version,
        event_id=envelope.id,
        reason=reason,
        field=field,
    )
