"""Transactions of the inbox's own: begun, lent to the handler in the form that it knows, committed or rolled back whole.

What a database is given as decides what the handler is lent:

    psycopg      connection string, idle Connection, pool       Connection
    SQLAlchemy   Engine, sessionmaker (of SQLModel's sessions)  Connection, Session
    Django       django.db.connection, connections[alias]       that connection, inside atomic()

and the same for asyncio, but for Django. A library is imported only where something of it was given.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar, get_origin, get_type_hints

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from fencepost.consumer.connections import ANSWER_SECONDS, AsyncPool, Pool
from fencepost.schemas.errors import CommitWasRollback, ConfigError, WrongTransaction
from fencepost.schemas.transaction import AsyncTransaction, Transaction, instance_of

__all__ = [
    "AsyncDatabase",
    "AsyncTransactions",
    "Begun",
    "Database",
    "Transactions",
    "async_transactions_of",
    "beginning",
    "ended",
    "opened",
    "opened_async",
    "require_alive",
    "swallowed",
    "transactions_of",
    "unusable",
]

C = TypeVar("C", Connection[Any], AsyncConnection[Any])


@dataclass(slots=True)
class Begun(Generic[C]):
    """One open transaction: ``conn`` is psycopg's, ``tx`` is what the handler is lent.

    ``alive`` raises CommitWasRollback unless what was begun still stands and can be committed. ``savepoint`` is a block
    (an async one for asyncio) that is taken back alone when it raises.
    """

    conn: C
    tx: Any
    alive: Callable[[], None]
    savepoint: Callable[[], Any]


class Transactions(ABC):
    """Begins transactions of one kind. ``renews``: a lost connection is replaced at the next begin."""

    lends: type[Any]
    renews: bool = True

    @abstractmethod
    def begin(self, *, held: bool = False) -> AbstractContextManager[Begun[Connection[Any]]]:
        """A transaction that is committed at the end of the block, and rolled back when the block raises.

        ``held``: BEGIN may be left to the first statement, which then has to start with what `beginning` says.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what was opened here."""


class AsyncTransactions(ABC):
    """As `Transactions`, for asyncio."""

    lends: type[Any]
    renews: bool = True

    @abstractmethod
    def begin(self, *, held: bool = False) -> AbstractAsyncContextManager[Begun[AsyncConnection[Any]]]:
        """As `Transactions.begin`."""

    @abstractmethod
    async def close(self) -> None:
        """Ends what was opened here."""


class Connects(Protocol):
    """A SQLAlchemy Engine."""

    def connect(self) -> Transaction: ...


class Makes(Protocol):
    """A SQLAlchemy sessionmaker."""

    def __call__(self) -> Transaction: ...


class AsyncConnects(Protocol):
    """A SQLAlchemy AsyncEngine."""

    def connect(self) -> AsyncTransaction: ...


class AsyncMakes(Protocol):
    """A SQLAlchemy async_sessionmaker."""

    def __call__(self) -> AsyncTransaction: ...


Database = str | Transaction | Pool | Connects | Makes | Transactions
AsyncDatabase = str | AsyncTransaction | AsyncPool | AsyncConnects | AsyncMakes | AsyncTransactions


def transactions_of(
    database: Database, handler: Callable[..., object], limit: int = 1, *, answer_within: float = ANSWER_SECONDS
) -> Transactions:
    """The transactions of this database for this handler; ConfigError (``database``) where the two do not fit.

    ``limit`` bounds the connections that are opened from a connection string, ``answer_within`` seconds each exchange on
    them; a connection, pool or engine that was given has limits of its own.
    """
    return _fitting(_transactions(database, limit, answer_within), handler)


def async_transactions_of(
    database: AsyncDatabase, handler: Callable[..., object], limit: int = 1, *, answer_within: float = ANSWER_SECONDS
) -> AsyncTransactions:
    """As `transactions_of`, for asyncio."""
    return _fitting(_async_transactions(database, limit, answer_within), handler)


@contextmanager
def opened(database: Database, handler: Callable[..., object], wait_seconds: float) -> Generator[Transactions]:
    """The same for one delivery: what a connection string opened is closed again, all else is left open.

    ``wait_seconds`` for another copy come on top of the time in which the database has to answer.
    """
    if isinstance(database, Transactions):
        yield database
        return
    made = transactions_of(database, handler, answer_within=ANSWER_SECONDS + wait_seconds)
    try:
        yield made
    finally:
        if isinstance(database, str):
            made.close()


@asynccontextmanager
async def opened_async(
    database: AsyncDatabase, handler: Callable[..., object], wait_seconds: float
) -> AsyncGenerator[AsyncTransactions]:
    """As `opened`, for asyncio."""
    if isinstance(database, AsyncTransactions):
        yield database
        return
    made = async_transactions_of(database, handler, answer_within=ANSWER_SECONDS + wait_seconds)
    try:
        yield made
    finally:
        if isinstance(database, str):
            await made.close()


def beginning(conn: Connection[Any] | AsyncConnection[Any]) -> list[bytes]:
    """What has to go before a query that does not go through psycopg's cursor, which begins at the first statement.

    Invariant: no such query runs outside a transaction, where it would commit by itself. A transaction that is held
    back has sent nothing yet, nor have SQLAlchemy's and Django's; the words are psycopg's for this connection.
    """
    if conn.pgconn.transaction_status != TransactionStatus.IDLE:
        return []
    if conn.isolation_level is None and conn.read_only is None and conn.deferrable is None:
        return [b"BEGIN"]
    words = ["BEGIN"]
    if conn.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {conn.isolation_level.name.replace('_', ' ')}")
    if conn.read_only is not None:
        words.append("READ ONLY" if conn.read_only else "READ WRITE")
    if conn.deferrable is not None:
        words.append("DEFERRABLE" if conn.deferrable else "NOT DEFERRABLE")
    return [" ".join(words).encode()]


def require_alive(conn: Connection[Any] | AsyncConnection[Any]) -> None:
    """Invariant: a transaction in which an error was swallowed is never reported as committed."""
    match conn.pgconn.transaction_status:
        case TransactionStatus.INTRANS:
            return
        case TransactionStatus.INERROR:
            raise swallowed()
        case _:
            raise ended()


def ended() -> CommitWasRollback:
    """The handler ended what was begun for it."""
    return _rolled_back(
        "the handler ended the transaction", "the inbox commits; do not commit or roll back in a handler"
    )


def swallowed() -> CommitWasRollback:
    """An error inside the handler left nothing to commit."""
    return _rolled_back("a database error was swallowed", "let it propagate, or wrap what may fail in a savepoint")


def unusable(refused: WrongTransaction) -> ConfigError:
    """No transaction can be begun here, whatever the handler does."""
    return ConfigError(refused.message, field="database", hint=refused.hint)


def _transactions(database: Database, limit: int, answer_within: float) -> Transactions:
    given: Any = database
    if isinstance(database, Transactions):
        return database
    if instance_of(given, "sqlalchemy.engine", "Engine") or instance_of(given, "sqlalchemy.orm", "sessionmaker"):
        from fencepost.consumer.transactions.sqlalchemy import SqlAlchemyTransactions

        return SqlAlchemyTransactions(given)
    if instance_of(given, "django.db.backends.base.base", "BaseDatabaseWrapper") or instance_of(
        given, "django.utils.connection", "ConnectionProxy"
    ):
        from fencepost.consumer.transactions.django import DjangoTransactions

        return DjangoTransactions(given.alias)
    if isinstance(database, str | Connection) or _is_pool(given):
        from fencepost.consumer.transactions.psycopg import PsycopgTransactions

        return PsycopgTransactions(given, limit, answer_within)
    raise _no_database(database, "a connection string, connection or pool of psycopg, an Engine, a sessionmaker")


def _async_transactions(database: AsyncDatabase, limit: int, answer_within: float) -> AsyncTransactions:
    given: Any = database
    if isinstance(database, AsyncTransactions):
        return database
    if instance_of(given, "sqlalchemy.ext.asyncio", "AsyncEngine", "async_sessionmaker"):
        from fencepost.consumer.transactions.sqlalchemy import AsyncSqlAlchemyTransactions

        return AsyncSqlAlchemyTransactions(given)
    if isinstance(database, str | AsyncConnection) or _is_pool(given):
        from fencepost.consumer.transactions.psycopg import AsyncPsycopgTransactions

        return AsyncPsycopgTransactions(given, limit, answer_within)
    raise _no_database(
        database,
        "a connection string, AsyncConnection or asyncio pool of psycopg, an AsyncEngine, an async_sessionmaker",
    )


def _is_pool(given: Any) -> bool:
    """A session has a ``connection`` as well, and something to commit."""
    return callable(getattr(given, "connection", None)) and not hasattr(given, "commit")


def _no_database(database: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"a {type(database).__name__} begins no transactions for this handler",
        field="database",
        hint=f"give {allowed}; a plain function for Django; with a transaction of your own: reserve_in",
    )


T = TypeVar("T", Transactions, AsyncTransactions)


def _fitting(transactions: T, handler: Callable[..., object]) -> T:
    wanted = _wanted(handler)
    lent = transactions.lends
    if wanted is not None and not issubclass(lent, wanted) and not issubclass(wanted, lent):
        raise ConfigError(
            f"the handler takes a {wanted.__module__}.{wanted.__qualname__}, and this database lends a "
            f"{lent.__module__}.{lent.__qualname__}",
            field="database",
            hint="an engine lends connections, a sessionmaker its sessions",
        )
    return transactions


def _wanted(handler: Callable[..., object]) -> type[Any] | None:
    """The class of the handler's first argument, where it can be told."""
    annotation = next(iter(inspect.signature(handler).parameters.values())).annotation
    if isinstance(annotation, str):
        names = dict(getattr(inspect.unwrap(handler), "__globals__", {}))
        try:
            annotation = get_type_hints(SimpleNamespace(__annotations__={"tx": annotation}), globalns=names)["tx"]
        except (NameError, AttributeError):
            return None
    found = get_origin(annotation) or annotation
    if not isinstance(found, type) or found in (Any, inspect.Parameter.empty) or getattr(found, "_is_protocol", False):
        return None
    return found


def _rolled_back(what: str, hint: str) -> CommitWasRollback:
    return CommitWasRollback(f"{what}, so nothing can be reported as committed", field="handler", hint=hint)
