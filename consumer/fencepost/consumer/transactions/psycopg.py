"""psycopg: the handler is lent the connection itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from fencepost.consumer.connections import AsyncConnections, AsyncPool, Connections, Pool
from fencepost.consumer.transactions import AsyncTransactions, Begun, Transactions, require_alive
from fencepost.schemas.errors import WrongTransaction

__all__ = ["AsyncPsycopgTransactions", "PsycopgTransactions"]


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
    def begin(self) -> Generator[Begun[Connection[Any]]]:
        source = self._source
        with nullcontext(source) if isinstance(source, Connection) else source.connection() as conn:
            _require_idle(conn)
            with conn.transaction():
                yield Begun(conn, conn, partial(require_alive, conn))

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
    async def begin(self) -> AsyncGenerator[Begun[AsyncConnection[Any]]]:
        source = self._source
        async with nullcontext(source) if isinstance(source, AsyncConnection) else source.connection() as conn:
            _require_idle(conn)
            async with conn.transaction():
                yield Begun(conn, conn, partial(require_alive, conn))

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()


def _require_idle(conn: Connection[Any] | AsyncConnection[Any]) -> None:
    if conn.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
        raise WrongTransaction(
            "the connection is inside a transaction, and handle commits its own",
            field="subtransaction",
            hint="give an idle connection, or own the transaction and use reserve_in",
        )
