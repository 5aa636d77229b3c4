"""Every kind of transaction that an inbox can begin, behind one way to write a handler and to deliver to it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import sqlmodel
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import AsyncConnection, Connection
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn
from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelAsyncSession

from fencepost.consumer import handoff
from fencepost.consumer.connections import AsyncConnections, Connections
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox, inbox
from fencepost.consumer.outcomes import Handled, Unhandled
from fencepost.schemas.event import Event
from support.deliveries import Submitted
from support.transactions import async_engine, django_connection, engine


@dataclass(frozen=True, slots=True)
class Act:
    """What a handler does with the transaction it was lent, the same lines for every kind; ``run`` waits, if need be."""

    tx: Any

    def run(self, value: Any) -> Any:
        return await_only(value) if inspect.isawaitable(value) else value

    def execute(self, statement: str) -> Any:
        if isinstance(self.tx, BaseDatabaseWrapper):
            with self.tx.cursor() as cursor:
                return cursor.execute(statement)
        tx: Any = self.tx
        if isinstance(self.tx, Connection | AsyncConnection):
            return self.run(tx.execute(statement))
        # SQLModel wants its own name for it.
        return self.run((tx.exec if hasattr(tx, "exec") else tx.execute)(text(statement)))

    def value(self, statement: str) -> Any:
        if isinstance(self.tx, BaseDatabaseWrapper):
            with self.tx.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall()[0][0]
        return self.run(self.execute(statement).fetchone())[0]

    def insert(self, event: Submitted) -> None:
        self.execute(f"INSERT INTO done (tenant, operation, document) VALUES ('acme', '{event.operation}', '')")

    def hand_over(self, event: Event) -> bool:
        submit: Any = handoff.submit_async if inspect.iscoroutinefunction(self.tx.commit) else handoff.submit
        return bool(self.run(submit(self.tx, "report.analyse", event)))

    @contextmanager
    def savepoint(self) -> Generator[None]:
        if isinstance(self.tx, BaseDatabaseWrapper):
            with transaction.atomic(using=self.tx.alias):
                yield
            return
        tx: Any = self.tx
        plain = isinstance(self.tx, Connection | AsyncConnection)
        made: Any = tx.transaction() if plain else tx.begin_nested()
        if hasattr(made, "__enter__"):
            with made:
                yield
            return
        self.run(made.__aenter__())
        try:
            yield
        except BaseException as error:
            self.run(made.__aexit__(type(error), error, error.__traceback__))
            raise
        self.run(made.__aexit__(None, None, None))


Body = Callable[[Act, Submitted], None]
AnyInbox = Inbox[Submitted] | AsyncInbox[Submitted]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: what `handle` is given, from a connection string."""

    name: str
    open: Callable[[str], Any]
    asynchronous: bool = False

    def inbox(self, body: Body, **options: Any) -> AnyInbox:
        """An inbox whose handler runs the body."""
        if self.asynchronous:

            async def on_submitted(tx: Any, event: Submitted) -> None:
                await greenlet_spawn(body, Act(tx), event)

            return inbox(consumer="reports", **options)(on_submitted)

        def on_submitted_sync(tx: Any, event: Submitted) -> None:
            body(Act(tx), event)

        return inbox(consumer="reports", **options)(on_submitted_sync)

    def deliver(self, dsn: str, handler: AnyInbox, *deliveries: Delivery) -> list[Handled]:
        """Handles the deliveries one after the other, over one database object."""
        if isinstance(handler, Inbox):
            with self.open(dsn) as database:
                return [handler.handle(database, each) for each in deliveries]

        async def all_of_them() -> list[Handled]:
            async with self.open(dsn) as database:
                return [await handler.handle(database, each) for each in deliveries]

        return asyncio.run(all_of_them())

    def deliver_many(self, dsn: str, handler: AnyInbox, *deliveries: Delivery) -> list[Handled | Unhandled]:
        """Handles the deliveries as one batch."""
        if isinstance(handler, Inbox):
            with self.open(dsn) as database:
                return handler.handle_many(database, deliveries)

        async def all_of_them() -> list[Handled | Unhandled]:
            async with self.open(dsn) as database:
                return await handler.handle_many(database, deliveries)

        return asyncio.run(all_of_them())


@contextmanager
def _psycopg(dsn: str) -> Generator[Connections]:
    pool = Connections(dsn)
    try:
        yield pool
    finally:
        pool.close()


@asynccontextmanager
async def _psycopg_async(dsn: str) -> AsyncGenerator[AsyncConnections]:
    pool = AsyncConnections(dsn)
    try:
        yield pool
    finally:
        await pool.close()


@contextmanager
def _session(dsn: str) -> Generator[sessionmaker[Any]]:
    with engine(dsn) as made:
        yield sessionmaker(made)


@contextmanager
def _sqlmodel(dsn: str) -> Generator[sessionmaker[sqlmodel.Session]]:
    with engine(dsn) as made:
        yield sessionmaker(made, class_=sqlmodel.Session)


@asynccontextmanager
async def _session_async(dsn: str) -> AsyncGenerator[async_sessionmaker[Any]]:
    async with async_engine(dsn) as made:
        yield async_sessionmaker(made)


@asynccontextmanager
async def _sqlmodel_async(dsn: str) -> AsyncGenerator[async_sessionmaker[SqlModelAsyncSession]]:
    async with async_engine(dsn) as made:
        yield async_sessionmaker(made, class_=SqlModelAsyncSession)


KINDS = (
    Kind("psycopg", _psycopg),
    Kind("psycopg-async", _psycopg_async, asynchronous=True),
    Kind("connection", engine),
    Kind("connection-async", async_engine, asynchronous=True),
    Kind("session", _session),
    Kind("session-async", _session_async, asynchronous=True),
    Kind("sqlmodel", _sqlmodel),
    Kind("sqlmodel-async", _sqlmodel_async, asynchronous=True),
    Kind("django", django_connection),
)
