"""Reservation: inside the caller's transaction, an operation is taken for a consumer at most once.

`reserve_in` is for those who own the transaction; it never commits. Nothing may be handled unless the outcome is
``reserved``, and a conflict is kept as a dead letter when the caller commits.

Locks: the reservation row. A concurrent copy waits for the first transaction; bound that wait with lock_timeout.
"""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from fencepost.consumer.outcomes import Reservation, Reserved
from fencepost.consumer.retries import settle, settle_async
from fencepost.schemas.envelope import Envelope, to_attributes
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_consumer
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async

__all__ = ["reserve_in", "reserve_in_async", "stands"]

RESERVE: LiteralString = """
SELECT r.outcome, r.arrivals, r.other_epoch, pg_current_xact_id()::text
FROM fencepost.reserve(
    %(tenant)s, %(consumer)s, %(operation)s, %(type)s, %(version)s::integer, %(event_id)s::uuid, %(source)s,
    %(epoch)s::bigint, %(binding)s, %(event_time)s::timestamptz, %(coordinates)s, %(headers)s::jsonb, %(payload)s::bytea
) AS r
"""

# Waits no longer than this for another copy, and leaves lock_timeout as it was. The name of the application is changed for
# the transaction: the server reports the name when it goes back, so a client sees without asking that its transaction stands.
RESERVE_WITHIN: LiteralString = """
SELECT r.outcome, r.arrivals, r.other_epoch, pg_current_xact_id()::text,
       nullif(set_config('application_name', left(w.named, 50) || ' (inbox)', true), w.named),
       set_config('lock_timeout', w.before, true)
FROM (SELECT current_setting('application_name') AS named, current_setting('lock_timeout') AS before,
             set_config('lock_timeout', %(wait)s, true) AS wait OFFSET 0) AS w,
LATERAL fencepost.reserve(
    CASE WHEN w.wait IS NOT NULL THEN %(tenant)s END, %(consumer)s, %(operation)s, %(type)s, %(version)s::integer,
    %(event_id)s::uuid, %(source)s, %(epoch)s::bigint, %(binding)s, %(event_time)s::timestamptz, %(coordinates)s,
    %(headers)s::jsonb, %(payload)s::bytea) AS r
"""
LOCK_TIMEOUT: LiteralString = "SELECT set_config('lock_timeout', %(wait)s, true)"
LOCK_TIMEOUT_AS_BEFORE: LiteralString = "SET LOCAL lock_timeout TO DEFAULT"

_DONE = (Reserved.RESERVED, Reserved.DUPLICATE)


def reserve_in(
    tx: Transaction,
    consumer: str,
    envelope: Envelope,
    coordinates: str,
    *,
    headers: list[list[object]] | None = None,
    dead_letter: int | None = None,
    wait_seconds: float | None = None,
) -> Reservation:
    """Reserves the operation for ``consumer`` in the caller's transaction, and never commits.

    Verifies the digest first. Settles ``dead_letter``, where the delivery is one that was given back. ``wait_seconds``
    bounds the wait for another copy, else the caller's lock_timeout does. ``tx`` as of
    `fencepost.consumer.handoff.submit`. Raises Undecodable, InvalidInput, WrongTransaction where no transaction is
    open, and what PostgreSQL raises: serialization failures (retry the whole transaction) and, under a lock_timeout,
    LockNotAvailable.
    """
    values = _values(consumer, envelope, coordinates, headers, wait_seconds)
    query = RESERVE if wait_seconds is None else RESERVE_WITHIN
    conn = connection_of(tx)
    with conn.cursor(row_factory=tuple_row) as cursor:
        reservation = _reservation(cursor.execute(query, values).fetchone())
    if dead_letter is not None:
        if wait_seconds is not None:
            conn.execute(LOCK_TIMEOUT, values)
        settle(conn, consumer, dead_letter, gone=reservation.outcome in _DONE)
        if wait_seconds is not None:
            conn.execute(LOCK_TIMEOUT_AS_BEFORE)
    return reservation


async def reserve_in_async(
    tx: AsyncTransaction,
    consumer: str,
    envelope: Envelope,
    coordinates: str,
    *,
    headers: list[list[object]] | None = None,
    dead_letter: int | None = None,
    wait_seconds: float | None = None,
) -> Reservation:
    """As `reserve_in`, for asyncio."""
    values = _values(consumer, envelope, coordinates, headers, wait_seconds)
    query = RESERVE if wait_seconds is None else RESERVE_WITHIN
    conn = await connection_of_async(tx)
    async with conn.cursor(row_factory=tuple_row) as cursor:
        reservation = _reservation(await (await cursor.execute(query, values)).fetchone())
    if dead_letter is not None:
        if wait_seconds is not None:
            await conn.execute(LOCK_TIMEOUT, values)
        await settle_async(conn, consumer, dead_letter, gone=reservation.outcome in _DONE)
        if wait_seconds is not None:
            await conn.execute(LOCK_TIMEOUT_AS_BEFORE)
    return reservation


def stands(conn: Connection[Any] | AsyncConnection[Any], reservation: Reservation) -> bool:
    """True where it is known without asking that the transaction has not ended since; False where it has to be asked.

    Invariant: the mark goes with its transaction, and the server reports that before anything else is answered.
    """
    return reservation.mark is not None and conn.info.parameter_status("application_name") == reservation.mark


def _values(
    consumer: str,
    envelope: Envelope,
    coordinates: str,
    headers: list[list[object]] | None,
    wait_seconds: float | None,
) -> dict[str, object]:
    if not coordinates:
        raise InvalidInput("coordinates are empty", field="coordinates", hint="name broker, place and message")
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
        "binding": envelope.check(),
        "event_time": envelope.time,
        "coordinates": coordinates,
        "headers": Jsonb(headers),
        "wait": None if wait_seconds is None else f"{round(wait_seconds * 1000)}ms",
        "payload": payload,
    }


def _reservation(row: tuple[Any, ...] | None) -> Reservation:
    assert row is not None
    return Reservation(Reserved(row[0]), row[1], row[2], row[3], row[4] if len(row) > 4 else None)
