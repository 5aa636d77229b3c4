"""Publishing: one transaction in which PostgreSQL checks the fence, the callback writes, the fence is checked and
spent, and the commit checks it once more.

Crash here: [P] before the commit nothing was published and the successor does it; after it the job is done.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import Connection
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.result import complete_with
from fencepost.jobs.transaction import FencedTransaction
from fencepost.schemas.connect import ANSWER_SECONDS, address, connect
from fencepost.schemas.errors import (
    CommitWasRollback,
    FencepostError,
    InvalidInput,
    LeaseLost,
    Unreachable,
    Unresolved,
    WrongTransaction,
)

__all__ = ["PUBLISHED", "FencedTransaction", "publish", "published"]

T = TypeVar("T")

LOST = (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout)
MARGIN_SECONDS = 1.0
MAX_SECONDS = 1_000_000.0

# A limit of the session that is stricter stays.
LIMIT: LiteralString = """
SELECT set_config(s.name, %(ms)s::integer || 'ms', true)
FROM (VALUES ('statement_timeout'), ('idle_in_transaction_session_timeout')) AS s (name)
WHERE current_setting(s.name)::interval NOT BETWEEN interval '1 ms' AND %(ms)s::integer * interval '1 ms'"""
PUBLISHED: LiteralString = "SELECT fencepost.published(%(tenant)s, %(operation)s, %(class)s, %(attempt)s)"


def publish(
    conn_or_dsn: Connection[Any] | str,
    f: Fence,
    callback: Callable[[FencedTransaction], T],
    *,
    lease: float | None = None,
    result: bytes | None = None,
) -> T:
    """Commits what the callback wrote and completes the job, or does neither; returns what the callback returned.

    Opens and ends a transaction of its own; a connection must be idle. The callback gets a FencedTransaction and does
    nothing but write to this database: while it runs the job is locked and the lease is not renewed. When it raises,
    everything is rolled back and its exception comes out.

    ``lease``: seconds that are left of it. A second after its end PostgreSQL breaks off a statement that still runs, and
    ends the session of a callback that does nothing: LeaseLost, nothing was published, and the job is free for its
    successor. Without it only the session's own limits hold. ``result`` is kept with the completion, see ``result.keepable``.

    Raises StaleFence when the fence does not hold before, after or at the commit; EffectOpen; CommitWasRollback when
    the callback swallowed an SQL error; WrongTransaction for a connection in a transaction; Unreachable when the
    connection was lost and nothing was published; Unresolved when it was lost during the commit and the answer could
    not be read back either.
    """
    if inspect.iscoroutinefunction(callback):
        raise InvalidInput("the callback is asynchronous", field="callback", hint="write with plain functions here")
    limit = None if lease is None else min(max(lease, 0.0) + MARGIN_SECONDS, MAX_SECONDS)
    over = None if lease is None else time.monotonic() + lease
    with _opened(conn_or_dsn) as conn:
        if conn.info.transaction_status is not TransactionStatus.IDLE:
            raise WrongTransaction(
                "the connection is in a transaction", field="transaction", hint="publish on an idle connection"
            )
        try:
            if conn.autocommit:
                conn.execute("BEGIN")
            if limit is not None:
                conn.execute(LIMIT, {"ms": round(limit * 1000)})
            returned = _write(conn, f, callback, limit, result)
        except BaseException as error:
            lost = conn.closed and isinstance(error, LOST)
            if not conn.closed:
                conn.rollback()
            if (
                (lost or isinstance(error, psycopg.errors.QueryCanceled))
                and over is not None
                and time.monotonic() > over
            ):
                raise LeaseLost(
                    "the lease ended inside the publication, and nothing was published",
                    field="lease",
                    hint="write only what is computed already; stage it for the successor",
                ) from error
            if lost:
                raise _unreachable(conn_or_dsn, "the connection was lost before the commit") from error
            raise
        _commit(conn, conn_or_dsn, f)
        return returned


def _write(
    conn: Connection[Any], f: Fence, callback: Callable[[FencedTransaction], T], limit: float | None, kept: bytes | None
) -> T:
    fence(conn, f)
    # PostgreSQL breaks a statement off at the limit; one that is silent is left a moment after.
    with FencedTransaction.over(conn, answer_within=None if limit is None else limit + MARGIN_SECONDS) as lent:
        result = callback(lent)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidInput("the callback is asynchronous", field="callback", hint="write with plain functions here")
    match conn.info.transaction_status:
        case TransactionStatus.INTRANS:
            complete(conn, f) if kept is None else complete_with(conn, f, kept)
            return result
        case TransactionStatus.INERROR:
            raise CommitWasRollback(
                "a statement failed inside the callback and its error was swallowed: nothing was published",
                hint="let errors out of the callback, or wrap what may fail in `with tx.transaction():`",
            )
        case status:
            if conn.closed:
                raise psycopg.OperationalError("the connection was lost inside the callback")
            raise WrongTransaction(
                f"the callback left the transaction {status.name.lower()}",
                field="transaction",
                hint="end no transaction inside the callback",
            )


def _commit(conn: Connection[Any], conn_or_dsn: Connection[Any] | str, f: Fence) -> None:
    # Crash here: [P] the commit may have happened although nobody answered; the attempt is looked up by its id.
    try:
        conn.commit()
    except psycopg.OperationalError as error:
        if not conn.closed:
            raise
        if not _read_back(conn_or_dsn, f):
            raise _unreachable(conn_or_dsn, "the connection was lost and nothing was published") from error


def _read_back(conn_or_dsn: Connection[Any] | str, f: Fence) -> bool:
    try:
        with connect(_dsn(conn_or_dsn), autocommit=True, answer_within=ANSWER_SECONDS) as conn:
            return published(conn, f)
    except (psycopg.Error, Unreachable, FencepostError) as error:
        raise Unresolved(
            "the connection was lost during the commit and the outcome cannot be read",
            field="publication",
            hint="the job tells: done by this attempt, or its successor publishes",
        ) from error


def published(conn: Connection[Any], f: Fence) -> bool:
    """Whether this attempt completed the job; False is definite.

    Waits at most five seconds for a transaction that may still commit; then raises psycopg.errors.LockNotAvailable.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(PUBLISHED, f.parameters()).fetchone()
    assert row is not None
    return bool(row[0])


@contextmanager
def _opened(conn_or_dsn: Connection[Any] | str) -> Generator[Connection[Any]]:
    if isinstance(conn_or_dsn, Connection):
        yield conn_or_dsn
    else:
        with connect(conn_or_dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
            yield conn


def _dsn(conn_or_dsn: Connection[Any] | str) -> str:
    if isinstance(conn_or_dsn, str):
        return conn_or_dsn
    info = conn_or_dsn.info
    # A connection that is gone still knows how it was made, its password included.
    return make_conninfo(info.dsn, password=info.password) if info.password else info.dsn


def _unreachable(conn_or_dsn: Connection[Any] | str, message: str) -> Unreachable:
    return Unreachable(message, address=address(_dsn(conn_or_dsn)), field="database", hint="safe to try again")
