"""The psycopg connection behind a transaction that the caller already has, or a typed refusal; nothing is ever ended here.

    psycopg      Connection, AsyncConnection
    SQLAlchemy   Connection, Session, scoped_session and their asyncio twins, on postgresql+psycopg (SQLModel's as well)
    Django       django.db.connection, django.db.connections[alias]

Statements run on that connection beside the library, in its transaction: nothing is flushed, expired or logged by it.
No library is imported: an object of one exists only where somebody has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from fencepost.schemas.errors import WrongTransaction

__all__ = [
    "AsyncTransaction",
    "Transaction",
    "connection_of",
    "connection_of_async",
    "driver_error",
    "instance_of",
    "is_async",
]

C = TypeVar("C", Connection[Any], AsyncConnection[Any])

_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
_ENGINE = "make the engine for postgresql+psycopg:// (create_async_engine and AsyncSession for asyncio)"
_ISOLATION = "take the isolation level AUTOCOMMIT from this engine or connection"
_KINDS = "give a psycopg connection, a SQLAlchemy Connection or Session, or Django's connection"


class Transaction(Protocol):
    """Whatever carries a transaction of the caller; what can commit is recognised by that, and never asked to."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class AsyncTransaction(Protocol):
    """As `Transaction`, for asyncio."""

    def commit(self) -> Coroutine[Any, Any, None]: ...
    def rollback(self) -> Coroutine[Any, Any, None]: ...


def connection_of(tx: Transaction) -> Connection[Any]:
    """The psycopg connection whose next statement belongs to the caller's transaction.

    A SQLAlchemy session or connection that has not begun yet begins, as at any other statement. Raises WrongTransaction
    where each statement would commit by itself (``autocommit``), on another driver (``driver``), and for what carries
    no transaction (``transaction``).
    """
    given: Any = tx
    if isinstance(tx, Connection):
        return _held(
            _driver(given, Connection), "write `with conn.transaction():` around the domain change and this call"
        )
    if instance_of(given, "sqlalchemy.orm", "Session", "scoped_session"):
        return _of_sqlalchemy(given.connection())
    if instance_of(given, "sqlalchemy.engine", "Connection"):
        return _of_sqlalchemy(given)
    if instance_of(given, "django.db.backends.base.base", "BaseDatabaseWrapper") or instance_of(
        given, "django.utils.connection", "ConnectionProxy"
    ):
        return _of_django(given)
    hint = "await the form for asyncio" if is_async(tx) else _KINDS
    raise WrongTransaction(f"a {type(tx).__name__} carries no transaction here", field="transaction", hint=hint)


async def connection_of_async(tx: AsyncTransaction) -> AsyncConnection[Any]:
    """As `connection_of`, for psycopg's AsyncConnection and SQLAlchemy's AsyncConnection and AsyncSession."""
    given: Any = tx
    if isinstance(tx, AsyncConnection):
        return _held(
            _driver(given, AsyncConnection),
            "write `async with conn.transaction():` around the domain change and this call",
        )
    if not is_async(tx):
        raise WrongTransaction(
            f"a {type(tx).__name__} carries no transaction for asyncio", field="transaction", hint=_KINDS
        )
    found = given if instance_of(given, "sqlalchemy.ext.asyncio", "AsyncConnection") else await given.connection()
    raw = await found.get_raw_connection()
    behind = _held(_driver(raw.driver_connection, AsyncConnection), _ISOLATION)
    if not found.in_transaction():
        await found.begin()
    return behind


def is_async(tx: object) -> bool:
    """Whether ``tx`` belongs to asyncio."""
    return isinstance(tx, AsyncConnection) or instance_of(
        tx, "sqlalchemy.ext.asyncio", "AsyncConnection", "AsyncSession", "async_scoped_session"
    )


def driver_error(error: BaseException) -> psycopg.Error | None:
    """The error of psycopg that this is, or that SQLAlchemy or Django has wrapped; None for any other."""
    found: Any = error
    if instance_of(error, "sqlalchemy.exc", "DBAPIError"):
        found = found.orig
    elif instance_of(error, "django.db.utils", "Error"):
        found = error.__cause__
    return found if isinstance(found, psycopg.Error) else None


def _of_sqlalchemy(found: Any) -> Connection[Any]:
    behind = _held(_driver(found.connection.driver_connection, Connection), _ISOLATION)
    # Invariant: SQLAlchemy knows of the transaction; a commit of one that it does not know of would do nothing.
    if not found.in_transaction():
        found.begin()
    return behind


def _of_django(found: Any) -> Connection[Any]:
    found.ensure_connection()
    found.validate_no_broken_transaction()
    behind = _driver(found.connection, Connection, "configure Django for PostgreSQL, with psycopg 3 installed")
    return _held(behind, "write `with transaction.atomic():` around the domain change and this call")


def _driver(found: Any, wanted: type[C], hint: str = _ENGINE) -> C:
    if isinstance(found, wanted):
        return found
    kind = f"{type(found).__module__.partition('.')[0]}.{type(found).__name__}"
    raise WrongTransaction(f"the driver's connection is a {kind}, not psycopg's", field="driver", hint=hint)


def _held(conn: C, hint: str) -> C:
    """Invariant: what is written next waits for a commit of the caller's."""
    if conn.autocommit and conn.info.transaction_status not in _OPEN:
        raise WrongTransaction(
            "the connection is in autocommit mode and no transaction is open", field="autocommit", hint=hint
        )
    return conn


def instance_of(given: object, module: str, *names: str) -> bool:
    """Whether it is of one of these classes, if somebody has imported their module."""
    found = sys.modules.get(module)
    return isinstance(given, tuple(getattr(found, name) for name in names if hasattr(found, name)))
