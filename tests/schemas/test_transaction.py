"""What is accepted or scheduled is in the caller's own transaction, whose ever it is, or refused; it is never ended here."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, LiteralString

import psycopg
import pytest
import sqlalchemy
import sqlmodel
from django.db import DatabaseError
from django.db import transaction as django_transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import AsyncConnection, Connection
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelAsyncSession

from fencepost.consumer import handoff
from fencepost.consumer.outcomes import Reserved
from fencepost.consumer.reservation import reserve_in, reserve_in_async
from fencepost.jobs.submit import submit
from fencepost.relay import outbox
from fencepost.schemas.errors import InvalidInput, OperationConflict, WrongTransaction
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, driver_error
from support.database import Database
from support.deliveries import Submitted, envelope
from support.services import Pooler
from support.transactions import Thing, async_engine, django_connection, engine, things, url

COUNTS: LiteralString = """
SELECT (SELECT count(*) FROM thing), (SELECT count(*) FROM fencepost.outbox), (SELECT count(*) FROM fencepost.job),
       (SELECT count(*) FROM fencepost.reservation)"""
INSERT: LiteralString = "INSERT INTO thing (name) VALUES ('{}')"
ALL = (1, 1, 2, 1)
NONE = (0, 0, 0, 0)


@pytest.fixture
def domain(database: Database) -> Database:
    things(database)
    return database


@pytest.fixture
def domain18(database18: Database) -> Database:
    things(database18)
    return database18


@pytest.fixture
def django18(domain18: Database) -> Generator[BaseDatabaseWrapper]:
    with django_connection(domain18.dsn) as made:
        yield made


def event(operation: str = "op-1", document: str = "a") -> Submitted:
    return Submitted(tenant="acme", operation=operation, document=document)


def everything(tx: Transaction, operation: str = "op-1") -> None:
    """All that a caller may do inside a transaction of their own."""
    assert outbox.enqueue(tx, event(operation)).created
    assert handoff.submit(tx, "report.analyse", event(operation))
    assert submit(tx, "report.index", tenant="acme", operation=operation, args={})
    assert reserve_in(tx, "reports", envelope(operation=operation), f"at {operation}").outcome is Reserved.RESERVED


async def everything_async(tx: AsyncTransaction, operation: str = "op-1") -> None:
    assert (await outbox.enqueue(tx, event(operation))).created
    assert await handoff.submit_async(tx, "report.analyse", event(operation))
    assert await submit(tx, "report.index", tenant="acme", operation=operation, args={})
    reserved = await reserve_in_async(tx, "reports", envelope(operation=operation), f"at {operation}")
    assert reserved.outcome is Reserved.RESERVED


def counts(database: Database) -> tuple[Any, ...]:
    """Domain rows, events, jobs and reservations as another session sees them."""
    with database.connect() as conn:
        row = conn.execute(COUNTS).fetchone()
    assert row is not None
    return row


def test_a_session_carries_the_event_with_its_pending_changes_and_loses_it_with_them(domain: Database) -> None:
    with engine(domain.dsn) as made:
        with Session(made) as session:
            session.add(Thing(name="a"))
            everything(session)
            assert counts(domain) == NONE
            session.rollback()
            assert counts(domain) == NONE
        with Session(made) as session, session.begin():
            session.add(Thing(name="a"))
            everything(session)
            assert counts(domain) == NONE
        assert counts(domain) == ALL


def test_a_session_is_left_as_it_was(domain18: Database) -> None:
    with engine(domain18.dsn) as made, Session(made) as session:
        session.add(Thing(name="a", note="old"))
        session.commit()
        kept = session.get_one(Thing, "a")
        kept.note = "new"
        pending = Thing(name="b")
        session.add(pending)

        everything(session)

        assert pending in session.new, "nothing was flushed"
        assert kept in session.dirty and not sqlalchemy.inspect(kept).expired
        assert session.autoflush and session.expire_on_commit and session.is_active
        connection = session.connection()
        assert connection.in_transaction() and not connection.in_nested_transaction()
        with connection_of(session).cursor() as cursor:
            assert cursor.execute("SELECT note FROM thing WHERE name = 'a'").fetchall() == [("old",)]
        session.commit()
    assert counts(domain18) == (2, 1, 2, 1)


def test_a_savepoint_that_the_caller_rolls_back_takes_the_event_with_it(domain18: Database) -> None:
    with engine(domain18.dsn) as made, Session(made) as session, session.begin():
        with pytest.raises(IntegrityError), session.begin_nested():
            everything(session, "op-0")
            session.execute(sqlalchemy.text("INSERT INTO thing (name) VALUES ('a'), ('a')"))
        session.add(Thing(name="a"))
        everything(session)
    assert counts(domain18) == ALL

    with engine(domain18.dsn) as made, Session(made) as session, session.begin():
        with pytest.raises(OperationConflict), session.begin_nested():
            outbox.enqueue(session, event(document="b"))
        outbox.enqueue(session, event("op-2"))
        session.add(Thing(name="b"))
    assert counts(domain18) == (2, 2, 2, 1), "a conflict inside a savepoint costs the savepoint only"


def test_a_connection_of_sqlalchemy_carries_it_whether_it_has_begun_or_not(domain18: Database) -> None:
    with engine(domain18.dsn) as made:
        with made.connect() as conn:
            everything(conn)
            conn.rollback()
            assert counts(domain18) == NONE
            # Nothing but ours in the transaction: SQLAlchemy has to know that there is something to commit.
            everything(conn)
            conn.commit()
            assert counts(domain18) == (0, 1, 2, 1)
        with made.begin() as conn:
            conn.execute(sqlalchemy.text("INSERT INTO thing (name) VALUES ('a')"))
            everything(conn, "op-2")
        with pytest.raises(ValueError), made.begin() as conn:
            everything(conn, "op-3")
            raise ValueError
    assert counts(domain18) == (1, 2, 4, 2)


def test_a_scoped_session_and_a_session_of_sqlmodel_are_sessions(domain18: Database) -> None:
    with engine(domain18.dsn) as made:
        scoped = scoped_session(sessionmaker(made))
        everything(scoped)
        scoped.commit()
        scoped.remove()
        with sqlmodel.Session(made) as session:
            session.add(Thing(name="a"))
            everything(session, "op-2")
            session.commit()
            everything(session, "op-3")
    assert counts(domain18) == (1, 2, 4, 2)


def test_sessions_and_connections_for_asyncio_keep_the_same_promises(domain: Database) -> None:
    async def callers() -> None:
        async with async_engine(domain.dsn) as made:
            async with AsyncSession(made) as session:
                session.add(Thing(name="a"))
                await everything_async(session)
                await session.rollback()
                assert counts(domain) == NONE
                pending = Thing(name="a")
                session.add(pending)
                await everything_async(session)
                assert pending in session.new, "nothing was flushed"
                async with session.begin_nested() as savepoint:
                    await everything_async(session, "op-0")
                    await savepoint.rollback()
                await session.commit()
                assert counts(domain) == ALL
            async with SqlModelAsyncSession(made) as session, session.begin():
                await everything_async(session, "op-2")
            async with made.connect() as conn:
                await everything_async(conn, "op-3")
                await conn.commit()
                await everything_async(conn, "op-4")
                await conn.rollback()
            scoped = async_scoped_session(async_sessionmaker(made), scopefunc=asyncio.current_task)
            await everything_async(scoped, "op-5")
            await scoped.commit()
            await scoped.remove()

    asyncio.run(callers())
    assert counts(domain) == (1, 4, 8, 4)


def test_django_inside_atomic_carries_it_and_a_rollback_takes_it(
    domain18: Database, django18: BaseDatabaseWrapper
) -> None:
    def change(name: str) -> None:
        with django18.cursor() as cursor:
            cursor.execute("INSERT INTO thing (name) VALUES (%s)", [name])

    alias = django18.alias
    with pytest.raises(ValueError), django_transaction.atomic(using=alias):
        change("a")
        everything(django18)
        raise ValueError
    assert counts(domain18) == NONE
    with django_transaction.atomic(using=alias):
        with pytest.raises(ValueError), django_transaction.atomic(using=alias):
            everything(django18, "op-0")
            raise ValueError
        change("a")
        everything(django18)
        assert counts(domain18) == NONE
    assert counts(domain18) == ALL


def test_what_django_would_roll_back_in_silence_is_refused(domain18: Database, django18: BaseDatabaseWrapper) -> None:
    alias = django18.alias
    with django_transaction.atomic(using=alias):
        everything(django18)
        with pytest.raises(ValueError), django_transaction.atomic(using=alias, savepoint=False):
            raise ValueError
        with pytest.raises(django_transaction.TransactionManagementError):
            outbox.enqueue(django18, event("op-2"))
    assert counts(domain18) == NONE


def test_where_each_statement_commits_by_itself_nothing_is_accepted(
    domain18: Database, django18: BaseDatabaseWrapper
) -> None:
    def refused(tx: Transaction, hint: str) -> None:
        for act in (
            lambda: outbox.enqueue(tx, event("op-x")),
            lambda: handoff.submit(tx, "report.analyse", event("op-x")),
            lambda: submit(tx, "report.index", tenant="acme", operation="op-x", args={}),
            lambda: reserve_in(tx, "reports", envelope(operation="op-x"), "at op-x"),
        ):
            with pytest.raises(WrongTransaction) as caught:
                act()
            assert caught.value.field == "autocommit" and hint in str(caught.value)

    with domain18.connect(autocommit=True) as conn:
        with conn.transaction():
            everything(conn, "psycopg")
        refused(conn, "conn.transaction()")
    with django_transaction.atomic(using=django18.alias):
        everything(django18, "django")
    refused(django18, "transaction.atomic()")
    with engine(domain18.dsn) as made, Session(made) as session, session.begin():
        everything(session, "sqlalchemy")
    with engine(domain18.dsn, isolation_level="AUTOCOMMIT") as made:
        with Session(made) as session:
            refused(session, "AUTOCOMMIT")
        with made.connect() as connection:
            refused(connection, "AUTOCOMMIT")
            assert not connection.in_transaction(), "a refusal begins nothing"
            connection.execution_options(isolation_level="READ COMMITTED")
            everything(connection, "changed")
            connection.commit()
    with engine(domain18.dsn) as made, made.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        refused(connection, "AUTOCOMMIT")
    assert counts(domain18) == (0, 4, 8, 4)

    async def refused_async() -> None:
        async with async_engine(domain18.dsn) as made, AsyncSession(made) as session, session.begin():
            await everything_async(session, "sqlalchemy-async")
        async with (
            async_engine(domain18.dsn, isolation_level="AUTOCOMMIT") as made,
            AsyncSession(made) as session,
            made.connect() as conn,
        ):
            callers: list[AsyncTransaction] = [session, conn]
            for tx in callers:
                with pytest.raises(WrongTransaction) as caught:
                    await outbox.enqueue(tx, event("op-x"))
                assert caught.value.field == "autocommit"

    asyncio.run(refused_async())
    assert counts(domain18) == (0, 5, 10, 5)


def test_another_driver_is_refused_by_name_and_told_what_to_use(domain18: Database) -> None:
    async def on_asyncpg() -> None:
        made = create_async_engine(url(domain18.dsn, "asyncpg"))
        try:
            async with AsyncSession(made) as session, made.connect() as conn:
                callers: list[AsyncTransaction] = [session, conn]
                for tx in callers:
                    with pytest.raises(WrongTransaction) as refused:
                        await outbox.enqueue(tx, event())
                    assert refused.value.field == "driver"
                    assert "asyncpg" in str(refused.value) and "postgresql+psycopg://" in str(refused.value)
                await session.rollback()
        finally:
            await made.dispose()

    asyncio.run(on_asyncpg())
    other = sqlalchemy.create_engine("sqlite://")
    with Session(other) as session, pytest.raises(WrongTransaction) as refused:
        outbox.enqueue(session, event())
    other.dispose()
    assert refused.value.field == "driver" and "sqlite3" in str(refused.value)
    assert counts(domain18) == NONE


def test_a_sync_session_that_runs_inside_asyncio_is_refused_and_its_owner_accepted(domain18: Database) -> None:
    async def caller() -> None:
        async with async_engine(domain18.dsn) as made, AsyncSession(made) as session:
            with pytest.raises(WrongTransaction) as refused:
                await session.run_sync(lambda inner: outbox.enqueue(inner, event()))
            assert refused.value.field == "driver"
            await outbox.enqueue(session, event())
            await session.commit()

    asyncio.run(caller())
    assert counts(domain18) == (0, 1, 0, 0)


def test_what_carries_no_transaction_is_refused_by_name(domain18: Database) -> None:
    with engine(domain18.dsn) as made:
        strangers: list[Any] = [object(), None, domain18.dsn, made, sessionmaker(made)]
        for stranger in strangers:
            with pytest.raises(WrongTransaction) as refused:
                outbox.enqueue(stranger, event())
            assert refused.value.field == "transaction" and domain18.dsn not in str(refused.value)

    async def crossed() -> None:
        async with await AsyncConnection.connect(domain18.dsn) as conn:
            wrong: Any = conn
            with pytest.raises(WrongTransaction) as refused:
                handoff.submit(wrong, "report.analyse", event())
            assert refused.value.field == "transaction" and "asyncio" in str(refused.value)
        with psycopg.connect(domain18.dsn) as sync_conn:
            wrong = sync_conn
            with pytest.raises(WrongTransaction):
                await handoff.submit_async(wrong, "report.analyse", event())

    asyncio.run(crossed())
    assert counts(domain18) == NONE


def test_content_that_cannot_be_stored_leaves_session_and_transaction_usable(domain18: Database) -> None:
    with engine(domain18.dsn) as made, Session(made) as session, session.begin():
        session.add(Thing(name="a"))
        for bad in ("\0", "\ud800"):
            with pytest.raises(InvalidInput):
                outbox.enqueue(session, event(document=bad))
        everything(session)
    assert counts(domain18) == ALL


def test_what_a_library_has_wrapped_is_still_the_error_of_the_driver(
    domain18: Database, django18: BaseDatabaseWrapper
) -> None:
    def division(of: BaseException) -> bool:
        return isinstance(driver_error(of), psycopg.errors.DivisionByZero)

    with engine(domain18.dsn) as made, made.connect() as conn:
        with pytest.raises(DataError) as wrapped:
            conn.execute(sqlalchemy.text("SELECT 1/0"))
        assert division(wrapped.value)
    with pytest.raises(DatabaseError) as told, django18.cursor() as cursor:
        cursor.execute("SELECT 1/0")
    assert division(told.value)
    assert driver_error(ValueError()) is None


def test_behind_a_pooler_in_transaction_mode_every_kind_commits_with_its_caller(
    domain: Database, pgbouncer: Pooler
) -> None:
    through = pgbouncer.dsn(domain.dsn)
    with engine(through) as made, Session(made) as session:
        for number in range(8):
            session.add(Thing(name=f"thing-{number}"))
            everything(session, f"op-{number}")
            session.commit()
    with django_connection(through) as django, django_transaction.atomic(using=django.alias):
        everything(django, "django")

    async def caller() -> None:
        async with async_engine(through) as made, AsyncSession(made) as session, session.begin():
            await everything_async(session, "asyncio")

    asyncio.run(caller())
    assert counts(domain) == (8, 10, 20, 10)


def test_psycopg_is_taken_as_it_is(domain18: Database) -> None:
    with domain18.connect() as conn:
        assert connection_of(conn) is conn

    class Own(Connection[Any]):
        """A user's own class of connections."""

    with Own.connect(domain18.dsn) as own:
        everything(own)
    assert counts(domain18) == (0, 1, 2, 1)
