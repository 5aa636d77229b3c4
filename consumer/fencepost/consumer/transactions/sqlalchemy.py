"""SQLAlchemy 2 (and SQLModel): an engine lends its connections, a sessionmaker its sessions.

The handler may flush, and make savepoints. Its commit is refused; its rollback, and the rollback that a failed flush
does by itself, are told afterwards: then nothing is reported as committed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from psycopg import AsyncConnection as PsycopgAsyncConnection
from psycopg import Connection as PsycopgConnection
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from fencepost.consumer.transactions import (
    AsyncTransactions,
    Begun,
    Transactions,
    ended,
    require_alive,
    swallowed,
    unusable,
)
from fencepost.schemas.errors import Unreachable, WrongTransaction
from fencepost.schemas.transaction import connection_of, connection_of_async

__all__ = ["AsyncSqlAlchemyTransactions", "SqlAlchemyTransactions"]


class SqlAlchemyTransactions(Transactions):
    """Over an engine or a sessionmaker whose dialect is postgresql+psycopg."""

    def __init__(self, database: Engine | sessionmaker[Any]) -> None:
        self._database = database
        self.lends = Connection if isinstance(database, Engine) else database.class_

    @contextmanager
    def begin(self, *, held: bool = False) -> Generator[Begun[PsycopgConnection[Any]]]:
        with _pool_told(), self._new() as tx:
            tx.begin()
            try:
                conn = connection_of(tx)
            except WrongTransaction as refused:
                raise unusable(refused) from None
            guard = _Guard(tx, tx if isinstance(tx, Connection) else tx.connection(), conn)
            yield Begun(conn, tx, guard.alive, tx.begin_nested)
            guard.commits = True
            tx.commit()

    def close(self) -> None:
        """The pool stays with its owner."""

    def _new(self) -> Connection | Session:
        return self._database.connect() if isinstance(self._database, Engine) else self._database()


class AsyncSqlAlchemyTransactions(AsyncTransactions):
    """As `SqlAlchemyTransactions`, for asyncio; an engine serves one event loop."""

    def __init__(self, database: AsyncEngine | async_sessionmaker[Any]) -> None:
        self._database = database
        self._engine: AsyncEngine | None = None
        self.lends = AsyncConnection if isinstance(database, AsyncEngine) else database.class_

    @asynccontextmanager
    async def begin(self, *, held: bool = False) -> AsyncGenerator[Begun[PsycopgAsyncConnection[Any]]]:
        with _pool_told():
            async with self._new() as tx:
                await tx.begin()
                try:
                    conn = await connection_of_async(tx)
                except WrongTransaction as refused:
                    raise unusable(refused) from None
                connection = tx if isinstance(tx, AsyncConnection) else await tx.connection()
                self._engine = connection.engine
                inner = connection.sync_connection
                assert inner is not None, "it has been started"
                guard = _Guard(inner if isinstance(tx, AsyncConnection) else tx.sync_session, inner, conn)
                yield Begun(conn, tx, guard.alive, tx.begin_nested)
                guard.commits = True
                await tx.commit()

    def _new(self) -> AsyncConnection | AsyncSession:
        return self._database.connect() if isinstance(self._database, AsyncEngine) else self._database()

    async def close(self) -> None:
        """Ends the pool's connections, which belong to this event loop; the engine makes new ones when asked."""
        if self._engine is not None:
            await self._engine.dispose()


class _Guard:
    """Watches over one transaction that was begun for a handler."""

    def __init__(
        self,
        tx: Connection | Session,
        connection: Connection,
        conn: PsycopgConnection[Any] | PsycopgAsyncConnection[Any],
    ) -> None:
        self._tx = tx
        self._root = tx.get_transaction()
        self._conn = conn
        self.commits = False
        event.listen(connection, "commit", self._at_commit)

    def alive(self) -> None:
        """As of `Begun`."""
        root = self._tx.get_transaction()
        # Invariant: only while its own transaction stands is the connection ours to look at.
        if root is None or root is not self._root:
            raise ended()
        if not root.is_active:
            raise swallowed()
        require_alive(self._conn)

    def _at_commit(self, _: Connection) -> None:
        if not self.commits:
            raise WrongTransaction(
                "commit is refused inside a handler", field="commit", hint="return from the handler: the inbox commits"
            )
        # What was flushed last may have failed, too.
        require_alive(self._conn)


@contextmanager
def _pool_told() -> Generator[None]:
    try:
        yield
    except NoneFree:
        raise Unreachable(
            "every connection of the pool is in use", field="database", hint="give the engine a larger pool_size"
        ) from None
