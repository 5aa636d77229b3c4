"""psycopg: the handler is lent the connection itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from types import TracebackType
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, AsyncTransaction, Connection, Transaction
from psycopg.pq import PipelineStatus, TransactionStatus

from fencepost.consumer.connections import AsyncConnections, AsyncPool, Connections, Pool
from fencepost.consumer.transactions import AsyncTransactions, Begun, Transactions, require_alive
from fencepost.schemas.errors import WrongTransaction

__all__ = ["AsyncPsycopgTransactions", "PsycopgTransactions"]

FIRST: LiteralString = "SAVEPOINT fencepost_message"
NEXT: LiteralString = "RELEASE SAVEPOINT fencepost_message; SAVEPOINT fencepost_message"
BACK: LiteralString = "ROLLBACK TO SAVEPOINT fencepost_message"


class PsycopgTransactions(Transactions):
    """Over a connection string, one idle connection, or a pool."""

    lends = Connection

    def __init__(self, database: str | Connection[Any] | Pool, limit: int, answer_within: float) -> None:
        self._own: Connections | None = None
        if isinstance(database, str):
            self._own = Connections(database, limit=limit, answer_within=answer_within)
        self._source: Connection[Any] | Pool = self._own or database  # type: ignore[assignment]
        self.renews = not isinstance(database, Connection)

    def begin(self, *, held: bool = False) -> AbstractContextManager[Begun[Connection[Any]]]:
        if isinstance(self._source, Connection):
            return _Opened(self._source, held)
        return self._begin(self._source, held)

    @contextmanager
    def _begin(self, pool: Pool, held: bool) -> Generator[Begun[Connection[Any]]]:
        with pool.connection() as conn, _Opened(conn, held) as begun:
            yield begun

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class AsyncPsycopgTransactions(AsyncTransactions):
    """As `PsycopgTransactions`, for asyncio."""

    lends = AsyncConnection

    def __init__(self, database: str | AsyncConnection[Any] | AsyncPool, limit: int, answer_within: float) -> None:
        self._own: AsyncConnections | None = None
        if isinstance(database, str):
            self._own = AsyncConnections(database, limit=limit, answer_within=answer_within)
        self._source: AsyncConnection[Any] | AsyncPool = self._own or database  # type: ignore[assignment]
        self.renews = not isinstance(database, AsyncConnection)

    def begin(self, *, held: bool = False) -> AbstractAsyncContextManager[Begun[AsyncConnection[Any]]]:
        if isinstance(self._source, AsyncConnection):
            return _AsyncOpened(self._source, held)
        return self._begin(self._source, held)

    @asynccontextmanager
    async def _begin(self, pool: AsyncPool, held: bool) -> AsyncGenerator[Begun[AsyncConnection[Any]]]:
        async with pool.connection() as conn, _AsyncOpened(conn, held) as begun:
            yield begun

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()


class _Opened:
    """A transaction on one connection. A class, because it is on the way of every message, and a generator costs more."""

    __slots__ = ("_conn", "_transaction")

    def __init__(self, conn: Connection[Any], held: bool) -> None:
        _require_idle(conn)
        self._conn = conn
        self._transaction = _Held(conn) if held else Transaction(conn)

    def __enter__(self) -> Begun[Connection[Any]]:
        self._transaction.__enter__()
        conn = self._conn
        return Begun(conn, conn, partial(require_alive, conn), _Savepoints(conn).block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._transaction.__exit__(kind, error, traceback)


class _AsyncOpened:
    """As `_Opened`, for asyncio."""

    __slots__ = ("_conn", "_transaction")

    def __init__(self, conn: AsyncConnection[Any], held: bool) -> None:
        _require_idle(conn)
        self._conn = conn
        self._transaction = _AsyncHeld(conn) if held else AsyncTransaction(conn)

    async def __aenter__(self) -> Begun[AsyncConnection[Any]]:
        await self._transaction.__aenter__()
        conn = self._conn
        return Begun(conn, conn, partial(require_alive, conn), _AsyncSavepoints(conn).block)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._transaction.__aexit__(kind, error, traceback)


class _Held(Transaction):
    """psycopg's transaction, but for its BEGIN, which travels with the first statement.

    To psycopg it is entered, so that it refuses a commit or rollback inside, and ends it. A psycopg that begins in another
    way will have begun, and only the round trip is lost.
    """

    def _get_enter_commands(self) -> Iterator[bytes]:
        return iter(())


class _AsyncHeld(AsyncTransaction):
    """As `_Held`, for asyncio."""

    def _get_enter_commands(self) -> Iterator[bytes]:
        return iter(())


class _Savepoints:
    """One after the other, in one round trip each: the next one releases the one before, the commit the last."""

    def __init__(self, conn: Connection[Any]) -> None:
        self._conn = conn
        self._open = False

    @contextmanager
    def block(self) -> Generator[None]:
        self._conn.execute(NEXT if self._open else FIRST)
        self._open = True
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):  # then the transaction is gone, which is looked at
                self._conn.execute(BACK)
            raise


class _AsyncSavepoints:
    """As `_Savepoints`, for asyncio."""

    def __init__(self, conn: AsyncConnection[Any]) -> None:
        self._conn = conn
        self._open = False

    @asynccontextmanager
    async def block(self) -> AsyncGenerator[None]:
        await self._conn.execute(NEXT if self._open else FIRST)
        self._open = True
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):  # as in _Savepoints
                await self._conn.execute(BACK)
            raise


def _require_idle(conn: Connection[Any] | AsyncConnection[Any]) -> None:
    if conn.pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
        raise WrongTransaction(
            "the connection is inside a transaction, and handle commits its own",
            field="subtransaction",
            hint="give an idle connection, or own the transaction and use reserve_in",
        )
    if conn.pgconn.pipeline_status != PipelineStatus.OFF:
        raise WrongTransaction(
            "the connection is in pipeline mode, and handle needs each answer",
            field="pipeline",
            hint="call handle outside pipeline()",
        )
