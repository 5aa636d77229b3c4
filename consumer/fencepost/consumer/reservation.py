"""Reservation: inside the caller's transaction, an operation is taken for a consumer at most once.

`reserve_in` is for those who own the transaction; it never commits. Nothing may be handled unless the outcome is
``reserved``, and a conflict is kept as a dead letter when the caller commits.

Locks: the reservation row. A concurrent copy waits for the first transaction; bound that wait with lock_timeout.
"""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from fencepost.consumer.outcomes import Reservation, Reserved
from fencepost.consumer.retries import settle, settle_async
from fencepost.schemas.envelope import Envelope, to_attributes
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_consumer
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async

__all__ = ["reserve_in", "reserve_in_async"]

RESERVE: LiteralString = """
SELECT r.outcome, r.arrivals, r.other_epoch, pg_current_xact_id()::text
FROM fencepost.reserve(
    %(tenant)s, %(consumer)s, %(operation)s, %(type)s, %(version)s::integer, %(event_id)s::uuid, %(source)s,
    %(epoch)s::bigint, %(binding)s, %(event_time)s::timestamptz, %(coordinates)s, %(headers)s::jsonb, %(payload)s::bytea
) AS r
"""

_DONE = (Reserved.RESERVED, Reserved.DUPLICATE)


def reserve_in(
    tx: Transaction,
    consumer: str,
    envelope: Envelope,
    coordinates: str,
    *,
    headers: list[list[object]] | None = None,
    dead_letter: int | None = None,
) -> Reservation:
    """Reserves the operation for ``consumer`` in the caller's transaction, and never commits.

    Verifies the digest first. Settles ``dead_letter``, where the delivery is one that was given back. ``tx`` as of
    `fencepost.consumer.handoff.submit`. Raises Undecodable, InvalidInput, WrongTransaction where no transaction is
    open, and what PostgreSQL raises: serialization failures (retry the whole transaction) and, under a lock_timeout,
    LockNotAvailable.
    """
    values = _values(consumer, envelope, coordinates, headers)
    conn = connection_of(tx)
    with conn.cursor(row_factory=tuple_row) as cursor:
        reservation = _reservation(cursor.execute(RESERVE, values).fetchone())
    if dead_letter is not None:
        settle(conn, consumer, dead_letter, gone=reservation.outcome in _DONE)
    return reservation


async def reserve_in_async(
    tx: AsyncTransaction,
    consumer: str,
    envelope: Envelope,
    coordinates: str,
    *,
    headers: list[list[object]] | None = None,
    dead_letter: int | None = None,
) -> Reservation:
    """As `reserve_in`, for asyncio."""
    values = _values(consumer, envelope, coordinates, headers)
    conn = await connection_of_async(tx)
    async with conn.cursor(row_factory=tuple_row) as cursor:
        reservation = _reservation(await (await cursor.execute(RESERVE, values)).fetchone())
    if dead_letter is not None:
        await settle_async(conn, consumer, dead_letter, gone=reservation.outcome in _DONE)
    return reservation


def _values(
    consumer: str, envelope: Envelope, coordinates: str, headers: list[list[object]] | None
) -> dict[str, object]:
    if not coordinates:
        raise InvalidInput("coordinates are empty", field="coordinates", hint="name broker, place and message")
    envelope.verify()
    payload = envelope.payload
    if headers is not None and envelope.body is not None:
        payload = envelope.body  # in structured mode these headers say nothing without it
    if headers is None:
        headers = [[name, value] for name, value in to_attributes(envelope).items()]
    return {
        "tenant": envelope.tenant,
        "consumer": as_consumer(consumer),
        "operation": envelope.operation,
        "type": envelope.type,
        "version": envelope.version,
        "event_id": envelope.id,
        "source": envelope.source,
        "epoch": envelope.epoch,
        "binding": envelope.binding,
        "event_time": envelope.time,
        "coordinates": coordinates,
        "headers": Jsonb(headers),
        "payload": payload,
    }


def _reservation(row: tuple[Any, ...] | None) -> Reservation:
    assert row is not None
    return Reservation(Reserved(row[0]), row[1], row[2], row[3])
