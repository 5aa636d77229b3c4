"""Dead letters that an operator gave back: taken by their consumer in its idle time, handled through its inbox, once.

Taking is committed before anything is handled, so a letter that brings its process down is met again only after
``LEASE_SECONDS``, and at most ``TAKES_MAX`` times. The transaction that reserves is the one that settles the letter.

Crash here (D1): after the take. The letter is due again when its lease is over; nothing was handled.
Crash here (D2): inside the handler. The letter is as it was; nothing was handled.
"""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

from fencepost.consumer.delivery import Delivery

__all__ = ["settle", "settle_async", "take", "take_async"]

LEASE_SECONDS = 60.0
TAKES_MAX = 5

TAKE: LiteralString = """
SELECT t.id, t.coordinates, t.headers, t.payload
FROM fencepost.take_dead_letter(%(consumer)s, make_interval(secs => %(lease)s), %(takes)s) AS t"""
SETTLE: LiteralString = "SELECT fencepost.settle_dead_letter(%(id)s, %(consumer)s, %(gone)s)"


def take(tx: Connection[Any], consumer: str) -> Delivery | None:
    """The next due dead letter of ``consumer`` as the delivery it was, or None; commit before handling it."""
    with tx.cursor(row_factory=tuple_row) as cursor:
        return _delivery(cursor.execute(TAKE, _taking(consumer)).fetchone())


async def take_async(tx: AsyncConnection[Any], consumer: str) -> Delivery | None:
    """As `take`, for asyncio."""
    async with tx.cursor(row_factory=tuple_row) as cursor:
        return _delivery(await (await cursor.execute(TAKE, _taking(consumer))).fetchone())


def settle(tx: Connection[Any], consumer: str, dead_letter: int, *, gone: bool) -> None:
    """Removes the letter, or keeps it as what it has become, in the transaction that reserved its delivery.

    Raises InvalidInput (``id``) when an operator, or another copy of it, was faster: nothing may be handled then.
    """
    tx.execute(SETTLE, {"id": dead_letter, "consumer": consumer, "gone": gone})


async def settle_async(tx: AsyncConnection[Any], consumer: str, dead_letter: int, *, gone: bool) -> None:
    """As `settle`, for asyncio."""
    await tx.execute(SETTLE, {"id": dead_letter, "consumer": consumer, "gone": gone})


def _taking(consumer: str) -> dict[str, object]:
    return {"consumer": consumer, "lease": LEASE_SECONDS, "takes": TAKES_MAX}


def _delivery(row: tuple[Any, ...] | None) -> Delivery | None:
    return None if row is None else Delivery.from_dead_letter(row[0], row[1], row[2], bytes(row[3]))
