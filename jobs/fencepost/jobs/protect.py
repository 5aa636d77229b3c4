"""Protected tables: rows that PostgreSQL lets nobody write but the current fence of their tenant and operation.

The client has no part in it: triggers of the table look, in each statement, for a fence that the same transaction holds,
and the fence's own guard checks it once more at the commit.
"""

from __future__ import annotations

from typing import LiteralString

from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.transaction import Transaction, connection_of

__all__ = ["PROTECT", "UNPROTECT", "protect", "unprotect"]

PROTECT: LiteralString = "SELECT fencepost.protect(to_regclass(%(table)s), %(tenant)s, %(operation)s)"
UNPROTECT: LiteralString = "SELECT fencepost.unprotect(to_regclass(%(table)s))"


def protect(tx: Transaction, table: str, *, tenant: str, operation: str) -> None:
    """From the caller's commit on, no row is written but behind a fence of the tenant and operation that it names.

    INSERT, UPDATE and DELETE by any statement and of any client raise NotFenced at once, unless old and new row both name
    the tenant and operation of a fence that the transaction holds; TRUNCATE always does. ``tenant`` and ``operation`` name
    the two columns, of type text, varchar, uuid, integer or bigint; ``table`` is looked up as in any statement of the
    caller's. Partitions are covered, later ones too; call it again after adding some, so that truncating one by itself is
    refused as well, or after renaming a column. ``fencepost doctor`` reports what is not whole any more.

    Runs with the rights of the caller, who must own the table and have the role authority_admin (or migrator): in a
    migration of the application's, say. ``tx`` is as for ``submit``; never commits. The table is locked against everybody
    until the commit, and waited for at most five seconds (psycopg.errors.LockNotAvailable).

    Raises InvalidInput: ``table`` (none, not the caller's, a partition, inheritance), ``tenant`` or ``operation`` (no such
    column, its type), ``partition`` (another owner), ``owner``: a login that enqueues, relays, consumes or works is, or can
    become, the owner, and so could take the protection off. An installation that does not separate roles cannot tell.
    """
    names = {"table": table, "tenant": tenant, "operation": operation}
    for field, value in names.items():
        if not value or "\0" in value:
            raise InvalidInput(f"{field} is not a name", field=field, hint="name the table and two of its columns")
    connection_of(tx).execute(PROTECT, names)


def unprotect(tx: Transaction, table: str) -> None:
    """From the caller's commit on, the table is like any other; only its owner can do this.

    Raises InvalidInput for a table that is not protected; locks as ``protect`` does.
    """
    connection_of(tx).execute(UNPROTECT, {"table": table})
