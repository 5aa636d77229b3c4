"""Few connections, each used for one transaction at a time and kept only while it is idle and whole.

A connection that is lost, or left inside a transaction, is closed, never handed on; a loss closes the idle ones, too,
since they probably share its fate. Nothing depends on a session, so a transaction-mode pooler may stand in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, Protocol

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from fencepost.schemas.connect import address
from fencepost.schemas.contract import connect, connect_async
from fencepost.schemas.errors import Unreachable

__all__ = ["AsyncConnections", "AsyncPool", "Connections", "Pool", "require_contract"]

WAIT_SECONDS = 30.0
ANSWER_SECONDS = 60.0


class Pool(Protocol):
    """What is needed of a pool; ``psycopg_pool.ConnectionPool`` has it."""

    def connection(self) -> AbstractContextManager[Connection[Any]]: ...


class AsyncPool(Protocol):
    """What is needed of an asyncio pool; ``psycopg_pool.AsyncConnectionPool`` has it."""

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]: ...


class Connections:
    """At most ``limit`` connections to one database, opened when first needed, for threads.

    An exchange with the server that takes longer than ``answer_within`` seconds, a handler's statement included, ends with
    NoAnswer, an OperationalError, and the connection is closed.
    """

    def __init__(
        self, dsn: str, *, limit: int = 1, wait_seconds: float = WAIT_SECONDS, answer_within: float = ANSWER_SECONDS
    ) -> None:
        self._dsn = dsn
        self._answer_within = answer_within
        self._wait_seconds = wait_seconds
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[Connection[Any]] = []
        self._closed = False

    @contextmanager
    def connection(self) -> Generator[Connection[Any], None, None]:
        """A connection outside any transaction, or Unreachable when none comes within the wait."""
        if not self._slots.acquire(timeout=self._wait_seconds):
            raise _all_in_use(self._dsn)
        try:
            with self._lock:
                conn = self._idle.pop() if self._idle else None
            conn = conn or connect(self._dsn, answer_within=self._answer_within)
            try:
                yield conn
            finally:
                self._put_back(conn)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Closes the idle connections; one in use is closed when its user is done."""
        self._closed = True
        self._drop_idle()

    def _put_back(self, conn: Connection[Any]) -> None:
        if conn.closed:
            self._drop_idle()
        elif self._closed or conn.info.transaction_status != TransactionStatus.IDLE:
            conn.close()
        else:
            with self._lock:
                self._idle.append(conn)

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for conn in idle:
            conn.close()


class AsyncConnections:
    """At most ``limit`` connections to one database, opened when first needed, for one event loop.

    Each exchange with the server has its deadline, as in ``Connections``.
    """

    def __init__(
        self, dsn: str, *, limit: int = 1, wait_seconds: float = WAIT_SECONDS, answer_within: float = ANSWER_SECONDS
    ) -> None:
        self._dsn = dsn
        self._answer_within = answer_within
        self._wait_seconds = wait_seconds
        self._slots = asyncio.BoundedSemaphore(limit)
        self._idle: list[AsyncConnection[Any]] = []
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[AsyncConnection[Any], None]:
        """A connection outside any transaction, or Unreachable when none comes within the wait."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise _all_in_use(self._dsn) from None
        try:
            conn = self._idle.pop() if self._idle else await connect_async(self._dsn, answer_within=self._answer_within)
            try:
                yield conn
            finally:
                # Invariant: closed, or idle and back, whatever was cancelled; never left behind inside a transaction.
                await self._put_back(conn)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Closes the idle connections; one in use is closed when its user is done."""
        self._closed = True
        await self._drop_idle()

    async def _put_back(self, conn: AsyncConnection[Any]) -> None:
        if conn.closed:
            await self._drop_idle()
        elif self._closed or conn.info.transaction_status != TransactionStatus.IDLE:
            await conn.close()
        else:
            self._idle.append(conn)

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for conn in idle:
            await conn.close()


def require_contract(database: object) -> None:
    """ContractMismatch where this code may not work with the database; asked where it is a connection string.

    One that cannot be asked now is no reason to end: every new connection asks again.
    """
    if isinstance(database, str):
        with suppress(psycopg.Error, Unreachable):
            connect(database, autocommit=True, answer_within=ANSWER_SECONDS).close()


def _all_in_use(dsn: str) -> Unreachable:
    return Unreachable("every connection is in use", address=address(dsn), field="database", hint="raise concurrency")
