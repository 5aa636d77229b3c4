"""What a batch of deliveries has in hand: which may be reserved together, and what has become of each so far.

One statement reserves them, one ends the batch; in between the handlers run. Where one fails, what all have done is taken
back, and they run again, each in a savepoint. The database refuses a commit in between, for it would make duplicates of
events that nobody has handled. What is rare is handled alone afterwards, each in a transaction of its own: what cannot be
read, a second copy, and what is neither new nor a duplicate.

Order: once an event is not handled, no later one of its ordering key is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.outcomes import Busy, Handled, Outcome, Unhandled
from fencepost.consumer.reading import Reading
from fencepost.consumer.transactions import Begun, ended
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput, Undecodable
from fencepost.schemas.event import Event

__all__ = ["BATCH_MAX", "Batch", "Entry", "together", "together_async"]

BATCH_MAX = 1000

RESERVE_MANY: LiteralString = """
SELECT r.n, r.outcome, r.arrivals, r.other_epoch, set_config('lock_timeout', w.before, true)
FROM (SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %(wait)s, true) AS wait OFFSET 0) AS w,
LATERAL fencepost.reserve_many(
    CASE WHEN w.wait IS NOT NULL THEN %(consumer)s END, %(tenants)s::text[], %(operations)s::text[], %(types)s::text[],
    %(versions)s::integer[], %(event_ids)s::uuid[], %(sources)s::text[], %(epochs)s::bigint[], %(bindings)s::text[],
    %(event_times)s::timestamptz[], %(coordinates)s::text[]) AS r
ORDER BY r.n
"""
SETTLE_BATCH: LiteralString = "SELECT fencepost.settle_batch(%(consumer)s, %(unhandled)s::text[])"


@dataclass(frozen=True, slots=True)
class Entry:
    """A delivery of the batch whose digest is right; ``place`` is where it stands in the batch."""

    place: int
    delivery: Delivery
    envelope: Envelope
    binding: str

    @property
    def key(self) -> tuple[str, str]:
        """Whose order it is part of."""
        return self.envelope.tenant, self.envelope.ordering_key


class Batch:
    """Deliveries in their order, and the answer for each of them."""

    def __init__(self, reading: Reading, consumer: str, deliveries: Sequence[Delivery], wait_seconds: float) -> None:
        if len(deliveries) > BATCH_MAX:
            raise InvalidInput(
                f"a batch of more than {BATCH_MAX} deliveries", field="deliveries", hint="give fewer at a time"
            )
        self.deliveries = deliveries
        self._reading = reading
        self._consumer = consumer
        self._wait_seconds = wait_seconds
        self.entries: list[Entry] = []
        self._apart: list[tuple[int, tuple[str, str] | None]] = []
        self._seen: set[object] = set()
        self._arguments: dict[int, Event | Envelope | None] = {}
        for place, delivery in enumerate(deliveries):
            self._sort(place, delivery)
        self.begin()

    def _sort(self, place: int, delivery: Delivery) -> None:
        try:
            entry = Entry(place, delivery, *self._reading.verified(delivery))
        except Undecodable:
            self._apart.append((place, None))
            return
        envelope = entry.envelope
        identity = (envelope.tenant, envelope.operation, envelope.type)
        if delivery.dead_letter is not None or identity in self._seen or delivery.coordinates in self._seen:
            self._apart.append((place, entry.key))
        else:
            self.entries.append(entry)
        self._seen |= {identity, delivery.coordinates}

    def begin(self) -> None:
        """Nothing is known of any delivery: the transaction begins, or is repeated."""
        self._found: dict[int, Handled | Unhandled] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._unhandled: list[str] = []
        self._alone = list(self._apart)

    def reserving(self) -> dict[str, object]:
        """The values of RESERVE_MANY."""
        envelopes = [entry.envelope for entry in self.entries]
        return {
            "wait": f"{round(self._wait_seconds * 1000)}ms",
            "consumer": self._consumer,
            "tenants": _array([each.tenant for each in envelopes]),
            "operations": _array([each.operation for each in envelopes]),
            "types": _array([each.type for each in envelopes]),
            "versions": _array([str(each.version) for each in envelopes]),
            "event_ids": _array([str(each.id) for each in envelopes]),
            "sources": _array([each.source for each in envelopes]),
            "epochs": _array([str(each.epoch) for each in envelopes]),
            "bindings": _array([entry.binding for entry in self.entries]),
            "event_times": _array([each.time.isoformat() for each in envelopes]),
            "coordinates": _array([entry.delivery.coordinates for entry in self.entries]),
        }

    def read(self) -> None:
        """Reads what the handlers are given; what cannot be read is left alone, whatever the database answers."""
        for entry in self.entries if not self._arguments else ():
            try:
                self._arguments[entry.place] = self._reading.argument(entry.envelope)
            except Undecodable:
                self._arguments[entry.place] = None

    def argument(self, entry: Entry) -> Event | Envelope | None:
        """What the handler is given."""
        return self._arguments[entry.place]

    def settling(self) -> dict[str, object]:
        """The values of SETTLE_BATCH."""
        return {"consumer": self._consumer, "unhandled": self._unhandled}

    def to_handle(self, entry: Entry, row: tuple[Any, ...]) -> bool:
        """Takes the database's answer; True when the handler has to run now."""
        match row[1]:
            case "reserved" | "duplicate" if self.argument(entry) is None:
                self._unhandled.append(entry.delivery.coordinates)
                self._alone.append((entry.place, None))
            case "reserved" if entry.key not in self._blocked:
                return True
            case "reserved":
                self.unhandled(entry, None)
            case "duplicate":
                self._settled(entry, Outcome.DUPLICATE, row)
            case _:
                self._alone.append((entry.place, entry.key))
        return False

    def handled(self, entry: Entry, row: tuple[Any, ...]) -> None:
        """The handler has run."""
        self._settled(entry, Outcome.HANDLED, row)

    def unhandled(self, entry: Entry, error: Exception | None) -> None:
        """The handler has failed, or may not run yet; the database is told at the end of the batch."""
        self._unhandled.append(entry.delivery.coordinates)
        self._found[entry.place] = Unhandled(entry.delivery.coordinates, error)
        self._blocked.add(entry.key)

    def alone(self) -> list[int]:
        """The places of those that are left for a transaction of their own, in order."""
        return sorted(place for place, _ in self._alone)

    def behind(self, place: int) -> bool:
        """Whether it stands behind one of its key that was not handled; then it is unhandled as well."""
        key = next(key for each, key in self._alone if each == place)
        if key not in self._blocked:
            return False
        self._found[place] = Unhandled(self.deliveries[place].coordinates, None)
        return True

    def settle_alone(self, place: int, found: Handled | Exception) -> None:
        """What became of one that was left alone."""
        if isinstance(found, Handled):
            self._found[place] = found
            return
        self._found[place] = Unhandled(self.deliveries[place].coordinates, found)
        self._blocked |= {key for each, key in self._alone if each == place and key is not None}

    def results(self) -> list[Handled | Unhandled]:
        """The answer for each delivery, in their order."""
        return [self._found[place] for place in range(len(self.deliveries))]

    def _settled(self, entry: Entry, outcome: Outcome, row: tuple[Any, ...]) -> None:
        self._found[entry.place] = Handled.of(entry.envelope, outcome, entry.delivery.coordinates, row[2], row[3])


def together(
    begun: Begun[Connection[Any]],
    batch: Batch,
    handler: Callable[[Any, Any], object],
    repeatable: Callable[[Exception], bool],
) -> None:
    """Reserves and handles the batch in a transaction that was begun for it, and never commits."""
    conn = begun.conn
    try:
        with conn.pipeline(), conn.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(RESERVE_MANY, batch.reserving())
            batch.read()  # while the server reserves
            rows = cursor.fetchall()
    except psycopg.errors.LockNotAvailable:
        raise _busy() from None
    pairs = list(zip(batch.entries, rows, strict=True))
    try:
        with begun.savepoint():
            for entry, row in pairs:
                if batch.to_handle(entry, row):
                    handler(begun.tx, batch.argument(entry))
                    begun.alive()
                    batch.handled(entry, row)
    except Exception as error:  # a handler may raise anything; which one did is found below
        if repeatable(error):
            raise
        _require_whole(conn, error)
        batch.begin()
        for entry, row in pairs:
            if not batch.to_handle(entry, row):
                continue
            try:
                with begun.savepoint():
                    handler(begun.tx, batch.argument(entry))
                    begun.alive()
            except Exception as failure:  # the caller judges
                if repeatable(failure):
                    raise
                _require_whole(conn, failure)
                batch.unhandled(entry, failure)
            else:
                batch.handled(entry, row)
    conn.execute(SETTLE_BATCH, batch.settling())


async def together_async(
    begun: Begun[AsyncConnection[Any]],
    batch: Batch,
    handler: Callable[[Any, Any], Awaitable[object]],
    repeatable: Callable[[Exception], bool],
) -> None:
    """As `together`, for asyncio."""
    conn = begun.conn
    try:
        async with conn.pipeline(), conn.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(RESERVE_MANY, batch.reserving())
            batch.read()  # while the server reserves
            rows = await cursor.fetchall()
    except psycopg.errors.LockNotAvailable:
        raise _busy() from None
    pairs = list(zip(batch.entries, rows, strict=True))
    try:
        async with begun.savepoint():
            for entry, row in pairs:
                if batch.to_handle(entry, row):
                    await handler(begun.tx, batch.argument(entry))
                    begun.alive()
                    batch.handled(entry, row)
    except Exception as error:  # a handler may raise anything; which one did is found below
        if repeatable(error):
            raise
        _require_whole(conn, error)
        batch.begin()
        for entry, row in pairs:
            if not batch.to_handle(entry, row):
                continue
            try:
                async with begun.savepoint():
                    await handler(begun.tx, batch.argument(entry))
                    begun.alive()
            except Exception as failure:  # the caller judges
                if repeatable(failure):
                    raise
                _require_whole(conn, failure)
                batch.unhandled(entry, failure)
            else:
                batch.handled(entry, row)
    await conn.execute(SETTLE_BATCH, batch.settling())


def _array(texts: list[str]) -> str | list[str]:
    """An array as PostgreSQL reads it, written at once: JSON writes all but control characters in the same way."""
    if not "".join(texts).isprintable():
        return texts
    return f"{{{json.dumps(texts, ensure_ascii=False)[1:-1]}}}"


def _require_whole(conn: Connection[Any] | AsyncConnection[Any], error: Exception) -> None:
    """Invariant: after a failure only what the savepoint holds is gone; else the whole batch is."""
    if conn.info.transaction_status is not TransactionStatus.INTRANS:
        raise ended() from error


def _busy() -> Busy:
    return Busy("another copy of one of the batch is being handled", field="operation", hint="handle them one by one")
