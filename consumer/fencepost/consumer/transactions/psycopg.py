"""psycopg: the handler is lent the connection itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
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

    @contextmanager
    def begin(self, *, held: bool = False) -> Generator[Begun[Connection[Any]]]:
        source = self._source
        with nullcontext(source) if isinstance(source, Connection) else source.connection() as conn:
            _require_idle(conn)
            alive, savepoint = partial(require_alive, conn), _Savepoints(conn).block
            if held:
                with _Held(conn):
                    yield Begun(conn, conn, alive, savepoint)
            else:
                with conn.transaction():
                    yield Begun(conn, conn, alive, savepoint)

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

    @asynccontextmanager
    async def begin(self, *, held: bool = False) -> AsyncGenerator[Begun[AsyncConnection[Any]]]:
        source = self._source
        async with nullcontext(source) if isinstance(source, AsyncConnection) else source.connection() as conn:
            _require_idle(conn)
            alive, savepoint = partial(require_alive, conn), _AsyncSavepoints(conn).block
            if held:
                async with _AsyncHeld(conn):
                    yield Begun(conn, conn, alive, savepoint)
            else:
                async with conn.transaction():
                    yield Begun(conn, conn, alive, savepoint)

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()


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
