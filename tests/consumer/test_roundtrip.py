"""A prepared reservation answers as the one in words does, and a server that has lost it costs one more attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, Connection, IsolationLevel
from pydantic import field_validator

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Busy, Handled, Outcome
from fencepost.schemas.event import Event
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.wire import listening

INSERT = "INSERT INTO done (tenant, operation, document) VALUES (%s, %s, %s)"
PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE name = 'fencepost_reserve'"
RESERVATION = "fencepost_reserve"
TIMES = 12
SCRIPT = [
    (0, "a", Outcome.HANDLED),
    (0, "a", Outcome.DUPLICATE),
    (1, "a", Outcome.DUPLICATE),
    (1, "b", Outcome.CONFLICT),
    (2, "c", Outcome.CONFLICT),
]


@inbox(consumer="reports", wait_seconds=0.2)
def reports(tx: Connection[Any], event: Submitted) -> None:
    tx.execute(INSERT, (event.tenant, event.operation, event.document))


@inbox(consumer="reports", wait_seconds=0.2)
async def reports_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute(INSERT, (event.tenant, event.operation, event.document))


def run(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test in an event loop of its own."""

    @wraps(test)
    def runs(**fixtures: Any) -> None:
        async def once() -> None:
            await test(**fixtures)

        asyncio.run(once())

    return runs


class Sync:
    """One connection that handles; `sql` runs a statement of the test on it."""

    def __init__(self, conn: Connection[Any]) -> None:
        self.conn: Any = conn

    async def handle(self, delivery: Delivery) -> Handled:
        return reports.handle(self.conn, delivery)

    async def sql(self, statement: str) -> list[tuple[Any, ...]]:
        done = self.conn.execute(statement)
        return done.fetchall() if done.description else []


class Async:
    """As `Sync`, for asyncio."""

    def __init__(self, conn: AsyncConnection[Any]) -> None:
        self.conn: Any = conn

    async def handle(self, delivery: Delivery) -> Handled:
        return await reports_async.handle(self.conn, delivery)

    async def sql(self, statement: str) -> list[tuple[Any, ...]]:
        done = await self.conn.execute(statement)
        return await done.fetchall() if done.description else []


@asynccontextmanager
async def handling(domain: Database, kind: str, threshold: int | None = 5) -> AsyncGenerator[Sync | Async]:
    if kind == "sync":
        with psycopg.connect(domain.dsn, autocommit=True, prepare_threshold=threshold) as conn:
            yield Sync(conn)
    else:
        async with await AsyncConnection.connect(domain.dsn, autocommit=True, prepare_threshold=threshold) as conn:
            yield Async(conn)


def arriving(n: int, document: str = "a", *, operation: str | None = None) -> Delivery:
    return from_kafka(envelope(operation=operation or f"op-{n}", document=document), n)


def counted(domain: Database) -> int:
    with domain.connect() as conn:
        return int(conn.execute("SELECT count(*) FROM done").fetchall()[0][0])


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("threshold", [0, 5, None])
@run
async def test_each_outcome_is_the_same_prepared_or_in_words(
    domain18: Database, kind: str, threshold: int | None
) -> None:
    async with handling(domain18, kind, threshold) as here:
        for n in range(TIMES):
            for offset, document, outcome in SCRIPT:
                delivery = from_kafka(envelope(operation=f"ü-{n}", document=document), 10 * n + offset)
                assert (await here.handle(delivery)).outcome is outcome
        with listening(here.conn) as sent:
            assert (await here.handle(arriving(999))).outcome is Outcome.HANDLED
        prepared = (await here.sql(PREPARED))[0][0]
    assert (prepared, RESERVATION in sent.statements) == ((0, False) if threshold is None else (1, True))
    assert (len(sent.statements), sent.round_trips) == (2, 3)
    assert counted(domain18) == TIMES + 1


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lost", ["DEALLOCATE ALL", "DISCARD ALL", "DEALLOCATE fencepost_reserve"])
@run
async def test_a_server_that_lost_the_statement_handles_all_the_same_and_is_not_asked_again(
    domain18: Database, kind: str, lost: str
) -> None:
    async with handling(domain18, kind) as here:
        for n in range(TIMES):
            await here.handle(arriving(n))
        assert await here.sql(PREPARED) == [(1,)]
        await here.sql(lost)
        for n in range(TIMES, 2 * TIMES):
            assert (await here.handle(arriving(n))).outcome is Outcome.HANDLED
        assert await here.sql(PREPARED) == [(0,)]
    assert counted(domain18) == 2 * TIMES


@pytest.mark.parametrize("kind", ["sync", "async"])
@run
async def test_another_statement_of_that_name_is_left_alone(domain18: Database, kind: str) -> None:
    async with handling(domain18, kind) as here:
        await here.sql("PREPARE fencepost_reserve AS SELECT 1")
        for n in range(TIMES):
            assert (await here.handle(arriving(n))).outcome is Outcome.HANDLED
        assert await here.sql("EXECUTE fencepost_reserve") == [(1,)]
    assert counted(domain18) == TIMES


@pytest.mark.parametrize("kind", ["sync", "async"])
@run
async def test_a_copy_that_is_still_handled_elsewhere_leaves_the_connection_as_it_was(
    domain18: Database, kind: str
) -> None:
    async with handling(domain18, kind) as here:
        for n in range(TIMES):
            await here.handle(arriving(n))
        with domain18.connect() as other:
            sent = envelope(operation="held")
            assert reports.reserve_in(other, sent, from_kafka(sent, 100).coordinates).arrivals == 1
            with pytest.raises(Busy):
                await here.handle(from_kafka(sent, 101))
            assert await here.sql("SELECT current_setting('lock_timeout')") == [("0",)]
            other.rollback()
        assert (await here.handle(from_kafka(sent, 101))).outcome is Outcome.HANDLED
    assert counted(domain18) == TIMES + 1


class Odd(Event, type="test.odd", version=1):
    """An event whose class has a bug."""

    document: str

    @field_validator("document")
    @classmethod
    def _odd(cls, value: str) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("threshold", [0, None])
@run
async def test_a_bug_in_the_reading_of_content_leaves_nothing_and_the_connection_as_it_was(
    domain18: Database, kind: str, threshold: int | None
) -> None:
    @inbox(consumer="odd")
    def odd(tx: Connection[Any], event: Odd) -> None:
        raise AssertionError

    @inbox(consumer="odd")
    async def odd_async(tx: AsyncConnection[Any], event: Odd) -> None:
        raise AssertionError

    delivery = from_kafka(envelope(type="test.odd", payload=b'{"document": "a"}'))
    async with handling(domain18, kind, threshold) as here:
        assert (await here.handle(arriving(1))).outcome is Outcome.HANDLED
        with pytest.raises(ZeroDivisionError):
            if kind == "sync":
                odd.handle(here.conn, delivery)
            else:
                await odd_async.handle(here.conn, delivery)
        assert await here.sql("SELECT count(*) FROM fencepost.delivery WHERE consumer = 'odd'") == [(0,)]
        assert (await here.handle(arriving(2))).outcome is Outcome.HANDLED
    assert counted(domain18) == 2


def test_the_isolation_that_a_handler_asks_for_is_that_of_a_prepared_reservation(domain18: Database) -> None:
    seen: list[object] = []

    @inbox(consumer="reports", isolation=IsolationLevel.SERIALIZABLE)
    def strict(tx: Connection[Any], event: Submitted) -> None:
        seen.extend(tx.execute("SELECT current_setting('transaction_isolation')").fetchall())

    with psycopg.connect(domain18.dsn, autocommit=True) as conn:
        for n in range(TIMES):
            assert strict.handle(conn, arriving(n)).outcome is Outcome.HANDLED
        assert conn.execute(PREPARED).fetchall() == [(1,)]
    assert seen == [("serializable",)] * TIMES
