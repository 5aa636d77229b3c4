"""Django: the handler runs inside ``atomic()`` on the connection of its thread, which it is lent."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection

from fencepost.consumer.transactions import Begun, Transactions, ended, require_alive, swallowed, unusable
from fencepost.schemas.errors import ConfigError, WrongTransaction
from fencepost.schemas.transaction import connection_of

__all__ = ["DjangoTransactions"]


class DjangoTransactions(Transactions):
    """Over one alias of DATABASES; each thread has its connection, kept as long as CONN_MAX_AGE says."""

    lends = BaseDatabaseWrapper

    def __init__(self, alias: str) -> None:
        self._alias = alias

    @contextmanager
    def begin(self, *, held: bool = False) -> Generator[Begun[Connection[Any]]]:
        connection = connections[self._alias]
        if connection.in_atomic_block:
            raise WrongTransaction(
                "the connection is inside atomic(), and handle commits its own",
                field="subtransaction",
                hint="call handle outside atomic(), or own the transaction and use reserve_in",
            )
        connection.close_if_unusable_or_obsolete()
        if not connection.get_autocommit():
            # Without autocommit atomic() would leave the commit to somebody else.
            raise ConfigError(
                "autocommit is off, so atomic() does not commit",
                field="database",
                hint="leave AUTOCOMMIT on in DATABASES",
            )
        try:
            with transaction.atomic(using=self._alias):
                try:
                    conn = connection_of(connection)
                except WrongTransaction as refused:
                    raise unusable(refused) from None

                def alive() -> None:
                    if connection.needs_rollback:
                        raise swallowed()
                    if connection.connection is not conn:
                        raise ended()
                    require_alive(conn)

                yield Begun(conn, connection, alive, partial(transaction.atomic, using=self._alias))
        finally:
            connection.close_if_unusable_or_obsolete()

    def close(self) -> None:
        """Every thread's connection stays with Django."""
