"""Reservation: inside the caller's transaction, an operation is taken for a consumer at most once.

`reserve_in` is for those who own the transaction; it never commits. Nothing may be handled unless the outcome is
``reserved``, and a conflict is kept as a dead letter when the caller commits.

Locks: the reservation row, then that of a delivery which has none. A concurrent copy waits for the first transaction, and for
one that counts the reserved delivery again; bound that wait with lock_timeout. Several operations in one transaction need one
order everywhere, or two such transactions end as a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, LiteralString

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.outcomes import Reservation, Reserved
from fencepost.consumer.reading import Arrived
from fencepost.consumer.retries import settle, settle_async
from fencepost.consumer.roundtrip import ALONE, ARGUMENTS, reserving
from fencepost.schemas.envelope import Envelope, to_attributes
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_consumer
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async

__all__ = ["reserve", "reserve_async", "reserve_in", "reserve_in_async", "stands"]

RESERVE: LiteralString = """
SELECT r.outcome, r.arrivals, r.other_epoch, pg_current_xact_id()::text
FROM fencepost.reserve(
    %(tenant)s, %(consumer)s, %(operation)s, %(type)s, %(version)s::integer, %(event_id)s::uuid, %(source)s,
    %(epoch)s::bigint, %(binding)s, %(event_time)s::timestamptz, %(coordinates)s, %(headers)s::jsonb, %(payload)s::bytea,
    %(wait_ms)s::integer
) AS r
"""

LOCK_TIMEOUT: LiteralString = "SELECT set_config('lock_timeout', %(wait_ms)s, true)"
LOCK_TIMEOUT_AS_BEFORE: LiteralString = "SET LOCAL lock_timeout TO DEFAULT"

_DONE = (Reserved.RESERVED, Reserved.DUPLICATE)


def reserve_in(tx: Transaction, consumer: str, envelope: Envelope, coordinates: str) -> Reservation:
    """Reserves the operation for ``consumer`` in the caller's transaction, and never commits.

    Verifies the digest first. The caller's lock_timeout bounds the wait for another copy. ``tx`` as of
    `fencepost.consumer.handoff.submit`. Raises Undecodable, InvalidInput, WrongTransaction where no transaction is
    open, and what PostgreSQL raises: serialization failures (retry the whole transaction) and, under a lock_timeout,
    LockNotAvailable.
    """
    values = _values(as_consumer(consumer), envelope, envelope.check(), coordinates)
    conn = connection_of(tx)
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(RESERVE, values).fetchone()
        if _needs_content(row):
            row = cursor.execute(RESERVE, values | _attributes(envelope)).fetchone()
    return _reservation(row)


async def reserve_in_async(tx: AsyncTransaction, consumer: str, envelope: Envelope, coordinates: str) -> Reservation:
    """As `reserve_in`, for asyncio."""
    values = _values(as_consumer(consumer), envelope, envelope.check(), coordinates)
    conn = await connection_of_async(tx)
    async with conn.cursor(row_factory=tuple_row) as cursor:
        row = await (await cursor.execute(RESERVE, values)).fetchone()
        if _needs_content(row):
            row = await (await cursor.execute(RESERVE, values | _attributes(envelope))).fetchone()
    return _reservation(row)


def reserve(
    conn: Connection[Any],
    consumer: str,
    arrived: Arrived,
    delivery: Delivery,
    wait_seconds: float,
    opening: list[bytes],
    meanwhile: Callable[[], None],
) -> Reservation:
    """As `reserve_in`, for a delivery whose digest is right, in a transaction of the inbox's own; settles its dead letter.

    ``opening`` goes before it in the same round trip, and begins the transaction where nothing else has. Waits
    ``wait_seconds`` for another copy, then LockNotAvailable, and leaves lock_timeout as it was. ``meanwhile`` runs while
    the server is at it.
    """
    arguments = _waiting(consumer, arrived, delivery, wait_seconds)
    with conn.lock:
        reservation = conn.wait(reserving(conn, opening, arguments, meanwhile))
    if reservation is None:
        values = dict(zip(ARGUMENTS, arguments, strict=True)) | _content(arrived.envelope, delivery)
        with conn.cursor(row_factory=tuple_row) as cursor:
            reservation = _reservation(cursor.execute(RESERVE, values).fetchone())
    if delivery.dead_letter is not None:
        conn.execute(LOCK_TIMEOUT, {"wait_ms": arguments[-1]})
        settle(conn, consumer, delivery.dead_letter, gone=reservation.outcome in _DONE)
        conn.execute(LOCK_TIMEOUT_AS_BEFORE)
    return reservation


async def reserve_async(
    conn: AsyncConnection[Any],
    consumer: str,
    arrived: Arrived,
    delivery: Delivery,
    wait_seconds: float,
    opening: list[bytes],
    meanwhile: Callable[[], None],
) -> Reservation:
    """As `reserve`, for asyncio."""
    arguments = _waiting(consumer, arrived, delivery, wait_seconds)
    async with conn.lock:
        reservation = await conn.wait(reserving(conn, opening, arguments, meanwhile))
    if reservation is None:
        values = dict(zip(ARGUMENTS, arguments, strict=True)) | _content(arrived.envelope, delivery)
        async with conn.cursor(row_factory=tuple_row) as cursor:
            reservation = _reservation(await (await cursor.execute(RESERVE, values)).fetchone())
    if delivery.dead_letter is not None:
        await conn.execute(LOCK_TIMEOUT, {"wait_ms": arguments[-1]})
        await settle_async(conn, consumer, delivery.dead_letter, gone=reservation.outcome in _DONE)
        await conn.execute(LOCK_TIMEOUT_AS_BEFORE)
    return reservation


def stands(conn: Connection[Any] | AsyncConnection[Any], reservation: Reservation) -> bool:
    """True where it is known without asking that the transaction has not ended since; False where it has to be asked.

    Invariant: the mark goes with its transaction, and the server reports that before anything else is answered.
    """
    return reservation.mark is not None and conn.pgconn.parameter_status(b"application_name") == reservation.mark


def _values(consumer: str, envelope: Envelope, binding: str, coordinates: str) -> dict[str, object]:
    if not coordinates:
        raise InvalidInput("coordinates are empty", field="coordinates", hint="name broker, place and message")
    found: dict[str, object] = dict(
        zip(ARGUMENTS, _arguments(consumer, envelope, binding, coordinates, ""), strict=True)
    )
    return found | {"headers": None, "payload": None, "wait_ms": None}


def _waiting(consumer: str, arrived: Arrived, delivery: Delivery, wait_seconds: float) -> list[str]:
    wait_ms = str(round(wait_seconds * 1000))
    return _arguments(consumer, arrived.envelope, arrived.binding, delivery.coordinates, wait_ms)


# As text: for each other type the driver looks up how to write it, with every statement anew.
def _arguments(consumer: str, envelope: Envelope, binding: str, coordinates: str, wait_ms: str) -> list[str]:
    """In the order of ARGUMENTS."""
    return [
        envelope.tenant,
        consumer,
        envelope.operation,
        envelope.type,
        str(envelope.version),
        str(envelope.id),
        envelope.source,
        str(envelope.epoch),
        binding,
        envelope.time.isoformat(),
        coordinates,
        wait_ms,
    ]


def _attributes(envelope: Envelope) -> dict[str, object]:
    return {
        "headers": Jsonb([[name, value] for name, value in to_attributes(envelope).items()]),
        "payload": envelope.payload,
    }


def _content(envelope: Envelope, delivery: Delivery) -> dict[str, object]:
    # In structured mode the headers say nothing without the whole body.
    payload = envelope.payload if envelope.body is None else envelope.body
    return {"headers": Jsonb(delivery.stored_headers()), "payload": payload}


def _needs_content(row: tuple[Any, ...] | None) -> bool:
    return row is not None and row[0] == ALONE


def _reservation(row: tuple[Any, ...] | None) -> Reservation:
    assert row is not None
    return Reservation(Reserved(row[0]), row[1], row[2], row[3])
