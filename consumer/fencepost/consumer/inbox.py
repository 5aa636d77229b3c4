"""One committed handling of every operation, whatever the broker delivers.

    @inbox(consumer="report-analysis")
    def on_accepted(tx, event: ReportAccepted) -> None:
        tx.execute(...)                              # domain change
        handoff.submit(tx, "report.analyse", event)  # same commit

``handle`` opens the transaction, reserves, runs the handler if the operation is new, and commits; only when it
returns may the delivery be acknowledged. Raised errors mean that nothing was committed, or that it is not known: the
delivery has to come again, and the reservation tells which of the two it was.

Crash here (I1): after the commit, before the acknowledgement. The delivery comes again and is a duplicate.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, LiteralString, Protocol, TypeVar, assert_never, cast, overload

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import tuple_row

from fencepost.consumer import dead_letters
from fencepost.consumer.batch import Batch, together, together_async
from fencepost.consumer.copies import AsyncCopies, Copies
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.outcomes import Busy, Handled, Outcome, Reservation, Reserved, Unhandled
from fencepost.consumer.reading import Arrived, Reading
from fencepost.consumer.reservation import reserve, reserve_async, reserve_in, reserve_in_async, stands
from fencepost.consumer.roundtrip import Unprepared
from fencepost.consumer.transactions import (
    AsyncDatabase,
    AsyncTransactions,
    Database,
    Transactions,
    beginning,
    ended,
    opened,
    opened_async,
)
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, Undecodable, Unreachable
from fencepost.schemas.identity import as_consumer
from fencepost.schemas.transaction import AsyncTransaction, Transaction, driver_error

__all__ = ["AsyncInbox", "Inbox", "inbox"]

TRIES_MAX = 5
WAIT_SECONDS = 5.0
BACKOFF_SECONDS = 0.05

SAME_TRANSACTION: LiteralString = "SELECT pg_current_xact_id_if_assigned()::text"
ISOLATION: dict[IsolationLevel, LiteralString] = {
    IsolationLevel.READ_UNCOMMITTED: "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
    IsolationLevel.READ_COMMITTED: "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
    IsolationLevel.REPEATABLE_READ: "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    IsolationLevel.SERIALIZABLE: "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
}

E = TypeVar("E")
T = TypeVar("T")
H = TypeVar("H", bound=Callable[..., object])


class _Unreadable(Exception):
    """The content cannot be read, which was found out while the operation was reserved: that is taken back."""

    def __init__(self, error: Undecodable) -> None:
        super().__init__()
        self.error = error


class _Inbox(Generic[H]):
    """What sync and async inboxes have in common: the handler, how it is fed, and the rules of a transaction."""

    def __init__(self, handler: H, consumer: str, wait_seconds: float, isolation: IsolationLevel | None) -> None:
        if not 0.001 <= wait_seconds <= 3600:
            raise ConfigError("wait_seconds is not between 0.001 and 3600", field="wait_seconds")
        self.consumer: str = as_consumer(consumer)
        self.handler = handler
        self.wait_seconds = wait_seconds
        self.isolation = isolation
        self._isolating = [] if isolation is None else [ISOLATION[isolation].encode()]
        self._copies, self._async_copies = Copies(), AsyncCopies()
        self.reading = Reading.of(handler)
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", type(handler).__name__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__name__}, consumer={self.consumer!r})"

    def _busy(self, arrived: Arrived) -> Busy:
        return Busy(
            f"another copy of {arrived.envelope.type} {arrived.envelope.id} is being handled",
            field="operation",
            hint="deliver it again later",
        )

    def _handled(self, outcome: Outcome, arrived: Arrived, delivery: Delivery, reservation: Reservation) -> Handled:
        envelope = arrived.envelope
        return Handled(
            outcome,
            delivery.coordinates,
            reservation.arrivals,
            reservation.other_epoch,
            envelope.tenant,
            envelope.operation,
            envelope.type,
            envelope.version,
            envelope.id,
        )


class Inbox(_Inbox[Callable[[Any, E], object]], Generic[E]):
    """A handler that runs once per committed reservation. Calling it runs the bare handler, as a test may want."""

    def __call__(self, tx: Any, event: E) -> None:
        self.handler(tx, event)

    def handle(self, database: Database, delivery: Delivery) -> Handled:
        """Handles one delivery in a transaction of its own; the result is committed when this returns.

        ``database`` decides what the handler is lent. A connection string, an idle connection or a pool of psycopg: a
        psycopg Connection. A SQLAlchemy Engine: a Connection; a sessionmaker: a Session. ``django.db.connection``: that,
        inside ``atomic()``. Serialization failures, deadlocks and lost connections are repeated as a whole, at most 5
        times (a lost connection not where a single one was given).
        Raises what the handler raised, after rolling back; CommitWasRollback when the handler swallowed a database
        error or ended the transaction; Busy when another copy is still being handled after ``wait_seconds``;
        Unreachable; ConfigError (``database``) where no transaction for this handler can be begun.
        """
        if isinstance(database, Transactions):
            return self._handle(database, delivery)
        with opened(database, self.handler, self.wait_seconds) as transactions:
            return self._handle(transactions, delivery)

    def _handle(self, transactions: Transactions, delivery: Delivery) -> Handled:
        try:
            arrived = Arrived(*self.reading.verified(delivery))
        except Undecodable as error:
            return self._set_aside(transactions, delivery, error)
        with self._copies.turn(_identity(arrived), self.wait_seconds) as mine:
            if not mine:
                raise self._busy(arrived)
            try:
                return self._repeated(transactions, lambda: self._once(transactions, delivery, arrived))
            except _Unreadable as found:
                unreadable = found.error
        return self._set_aside(transactions, delivery, unreadable)

    def _set_aside(self, transactions: Transactions, delivery: Delivery, error: Undecodable) -> Handled:
        with transactions.begin() as begun:
            return dead_letters.undecodable(begun.conn, self.consumer, delivery, error)

    def handle_many(self, database: Database, deliveries: Sequence[Delivery]) -> list[Handled | Unhandled]:
        """Handles a batch in one transaction; every `Handled` is committed when this returns, nothing of an `Unhandled` is.

        The answers stand in the order of the deliveries, which is the order in which handlers run. One that raises
        takes back its own changes, reservation and delivery, and leaves later events of its ordering key unhandled.
        What is rare (unreadable, a second copy, a conflict, before the horizon, of an old epoch) is handled alone, after the batch.
        ``database``, and what is repeated as a whole, as of `handle`. Raises, with nothing of the batch committed, Busy
        when another transaction holds one of the operations, CommitWasRollback when a handler ended the transaction,
        InvalidInput for more than 1000 deliveries: handle them one by one then.
        """
        batch = Batch(self.reading, self.consumer, deliveries, self.wait_seconds)
        with opened(database, self.handler, self.wait_seconds) as transactions:
            self._repeated(transactions, lambda: self._together(transactions, batch))
            for place in batch.alone():
                if not batch.behind(place):
                    try:
                        batch.settle_alone(place, self.handle(transactions, deliveries[place]))
                    except Exception as error:  # noqa: BLE001  # a handler may raise anything; the caller judges
                        batch.settle_alone(place, error)
        return batch.results()

    def _together(self, transactions: Transactions, batch: Batch) -> None:
        batch.begin()
        if not batch.entries:
            return
        with transactions.begin() as begun:
            if self.isolation is not None:
                begun.conn.execute(ISOLATION[self.isolation])
            together(begun, batch, self.handler, lambda error: _repeatable(error, transactions.renews))

    def _repeated(self, transactions: Transactions, once: Callable[[], T]) -> T:
        for tries in range(1, TRIES_MAX):
            try:
                return once()
            except Exception as error:  # SQLAlchemy and Django wrap those of psycopg
                if not _repeatable(error, transactions.renews):
                    raise
            time.sleep(_backoff(tries))
        return once()

    def reserve_in(self, tx: Transaction, envelope: Envelope, coordinates: str) -> Reservation:
        """`fencepost.consumer.reservation.reserve_in` for this consumer; never commits, runs no handler."""
        return reserve_in(tx, self.consumer, envelope, coordinates)

    def _once(self, transactions: Transactions, delivery: Delivery, arrived: Arrived) -> Handled:
        with transactions.begin(held=True) as begun:
            conn = begun.conn
            opening = beginning(conn) + self._isolating
            try:
                reservation = reserve(
                    conn,
                    self.consumer,
                    arrived,
                    delivery,
                    self.wait_seconds,
                    opening,
                    lambda: self.reading.finish(arrived),
                )
            except psycopg.errors.LockNotAvailable:
                raise self._busy(arrived) from None
            if arrived.unreadable is not None:
                raise _Unreadable(arrived.unreadable)
            match reservation.outcome:
                case Reserved.RESERVED:
                    self.handler(begun.tx, cast(E, arrived.argument))
                    begun.alive()
                    if not stands(conn, reservation):
                        with conn.cursor(row_factory=tuple_row) as cursor:
                            row = cursor.execute(SAME_TRANSACTION).fetchone()
                        if row is None or row[0] != reservation.transaction:
                            raise ended()
                    outcome = Outcome.HANDLED
                case Reserved.DUPLICATE:
                    outcome = Outcome.DUPLICATE
                case Reserved.CONFLICT:
                    outcome = Outcome.CONFLICT
                case Reserved.BEFORE_HORIZON:
                    outcome = Outcome.BEFORE_HORIZON
                case Reserved.OLD_EPOCH:
                    outcome = Outcome.OLD_EPOCH
                case _:
                    assert_never(reservation.outcome)
        return self._handled(outcome, arrived, delivery, reservation)


class AsyncInbox(_Inbox[Callable[[Any, E], Awaitable[object]]], Generic[E]):
    """As `Inbox`, for asyncio."""

    async def __call__(self, tx: Any, event: E) -> None:
        await self.handler(tx, event)

    async def handle(self, database: AsyncDatabase, delivery: Delivery) -> Handled:
        """As `Inbox.handle`, with an AsyncConnection or an asyncio pool of psycopg, an AsyncEngine, or an
        async_sessionmaker. Cancelled during the commit, the outcome is not known: deliver again.
        """
        if isinstance(database, AsyncTransactions):
            return await self._handle(database, delivery)
        async with opened_async(database, self.handler, self.wait_seconds) as transactions:
            return await self._handle(transactions, delivery)

    async def _handle(self, transactions: AsyncTransactions, delivery: Delivery) -> Handled:
        try:
            arrived = Arrived(*self.reading.verified(delivery))
        except Undecodable as error:
            return await self._set_aside(transactions, delivery, error)
        async with self._async_copies.turn(_identity(arrived), self.wait_seconds) as mine:
            if not mine:
                raise self._busy(arrived)
            try:
                return await self._repeated(transactions, lambda: self._once(transactions, delivery, arrived))
            except _Unreadable as found:
                unreadable = found.error
        return await self._set_aside(transactions, delivery, unreadable)

    async def _set_aside(self, transactions: AsyncTransactions, delivery: Delivery, error: Undecodable) -> Handled:
        async with transactions.begin() as begun:
            return await dead_letters.undecodable_async(begun.conn, self.consumer, delivery, error)

    async def handle_many(self, database: AsyncDatabase, deliveries: Sequence[Delivery]) -> list[Handled | Unhandled]:
        """As `Inbox.handle_many`, for what `AsyncInbox.handle` takes."""
        batch = Batch(self.reading, self.consumer, deliveries, self.wait_seconds)
        async with opened_async(database, self.handler, self.wait_seconds) as transactions:
            await self._repeated(transactions, lambda: self._together(transactions, batch))
            for place in batch.alone():
                if not batch.behind(place):
                    try:
                        batch.settle_alone(place, await self.handle(transactions, deliveries[place]))
                    except Exception as error:  # noqa: BLE001  # as in Inbox
                        batch.settle_alone(place, error)
        return batch.results()

    async def _together(self, transactions: AsyncTransactions, batch: Batch) -> None:
        batch.begin()
        if not batch.entries:
            return
        async with transactions.begin() as begun:
            if self.isolation is not None:
                await begun.conn.execute(ISOLATION[self.isolation])
            await together_async(begun, batch, self.handler, lambda error: _repeatable(error, transactions.renews))

    async def _repeated(self, transactions: AsyncTransactions, once: Callable[[], Awaitable[T]]) -> T:
        for tries in range(1, TRIES_MAX):
            try:
                return await once()
            except Exception as error:  # as in Inbox
                if not _repeatable(error, transactions.renews):
                    raise
            await asyncio.sleep(_backoff(tries))
        return await once()

    async def reserve_in(self, tx: AsyncTransaction, envelope: Envelope, coordinates: str) -> Reservation:
        """As `Inbox.reserve_in`."""
        return await reserve_in_async(tx, self.consumer, envelope, coordinates)

    async def _once(self, transactions: AsyncTransactions, delivery: Delivery, arrived: Arrived) -> Handled:
        async with transactions.begin(held=True) as begun:
            conn = begun.conn
            opening = beginning(conn) + self._isolating
            try:
                reservation = await reserve_async(
                    conn,
                    self.consumer,
                    arrived,
                    delivery,
                    self.wait_seconds,
                    opening,
                    lambda: self.reading.finish(arrived),
                )
            except psycopg.errors.LockNotAvailable:
                raise self._busy(arrived) from None
            if arrived.unreadable is not None:
                raise _Unreadable(arrived.unreadable)
            match reservation.outcome:
                case Reserved.RESERVED:
                    await self.handler(begun.tx, cast(E, arrived.argument))
                    begun.alive()
                    if not stands(conn, reservation):
                        async with conn.cursor(row_factory=tuple_row) as cursor:
                            row = await (await cursor.execute(SAME_TRANSACTION)).fetchone()
                        if row is None or row[0] != reservation.transaction:
                            raise ended()
                    outcome = Outcome.HANDLED
                case Reserved.DUPLICATE:
                    outcome = Outcome.DUPLICATE
                case Reserved.CONFLICT:
                    outcome = Outcome.CONFLICT
                case Reserved.BEFORE_HORIZON:
                    outcome = Outcome.BEFORE_HORIZON
                case Reserved.OLD_EPOCH:
                    outcome = Outcome.OLD_EPOCH
                case _:
                    assert_never(reservation.outcome)
        return self._handled(outcome, arrived, delivery, reservation)


class _Decorator(Protocol):
    @overload
    def __call__(self, handler: Callable[[T, E], Awaitable[None]], /) -> AsyncInbox[E]: ...
    @overload
    def __call__(self, handler: Callable[[T, E], None], /) -> Inbox[E]: ...


def inbox(*, consumer: str, wait_seconds: float = WAIT_SECONDS, isolation: IsolationLevel | None = None) -> _Decorator:
    """Makes a handler ``(tx, event)`` an inbox: it runs at most once committed per tenant, operation and type.

    ``tx`` is what ``handle`` was given a database of: a psycopg connection, a SQLAlchemy or SQLModel session or
    connection, or Django's.
    ``consumer`` names whose reservation it is; another consumer handles the same events on its own. ``wait_seconds``
    bounds the wait for a concurrent copy. ``isolation`` is that of the handler's transaction, else the connection's.
    A coroutine function becomes an `AsyncInbox`, any other an `Inbox`. Raises ConfigError for a handler whose event
    cannot be told from its annotation.
    """

    def decorate(handler: Callable[[Any, Any], Any], /) -> Any:
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
            return AsyncInbox[Any](handler, consumer, wait_seconds, isolation)
        return Inbox[Any](handler, consumer, wait_seconds, isolation)

    return decorate


def _identity(arrived: Arrived) -> tuple[str, str, str]:
    envelope = arrived.envelope
    return envelope.tenant, envelope.operation, envelope.type


def _repeatable(error: Exception, renews: bool) -> bool:
    """Whether the whole transaction may run again now: it certainly left nothing, or the reservation will tell."""
    if isinstance(error, (Unreachable, Unprepared)):
        return True
    driver = driver_error(error)
    if not isinstance(driver, psycopg.OperationalError):
        return False
    if driver.sqlstate is not None and not driver.sqlstate.startswith(("08", "57P")):
        return driver.sqlstate in ("40001", "40P01")
    return renews


def _backoff(tries: int) -> float:
    return BACKOFF_SECONDS * (1 << tries - 1) * random.uniform(0.5, 1.5)
