"""The contract between code and database: one number on each side, and how far back each goes on working with the other.

The number is raised in every release that changes any SQL, here and in ``sql/functions/authority/contract.sql``. Code of
contract N works with a database of at least ``OLDEST``, and with a newer one for as long as that one says that it still
serves N. So a database is migrated first, old and new code work on it side by side, and code may go back.
"""

from __future__ import annotations

from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

from fencepost.schemas import connect as plain
from fencepost.schemas.connect import AsyncPunctual, Punctual
from fencepost.schemas.errors import ContractMismatch

__all__ = ["CONTRACT", "OLDEST", "Contract", "connect", "connect_async", "judge", "read", "require", "require_async"]

CONTRACT = 1
"""What this code was made for."""

OLDEST = 1
"""The oldest database that this code works with."""

DECLARED: LiteralString = "SELECT c.version, c.serves FROM fencepost.contract() AS c"
ABSENT = (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName)


class Contract(NamedTuple):
    """What a database declares: its own number, and the oldest code that it still serves."""

    version: int
    serves: int


def judge(found: Contract | None) -> None:
    """Nothing where this code may work with such a database; ContractMismatch (``database`` or ``program``) says what is too old."""
    if found is None:
        # As the command line tells it of a function that is missing.
        raise ContractMismatch(
            "this database has no fencepost schema of this version", field="database", hint="run `fencepost migrate`"
        )
    if found.version < OLDEST:
        raise ContractMismatch(
            f"the database has contract {found.version}, and this program works with {OLDEST} and newer",
            field="database",
            hint="run `fencepost migrate` of this version, then start this program",
        )
    if found.serves > CONTRACT:
        raise ContractMismatch(
            f"the database has contract {found.version} and serves programs of {found.serves} and newer; this one has {CONTRACT}",
            field="program",
            hint="upgrade this program",
        )


def read(conn: Connection[Any]) -> Contract | None:
    """What the database declares; None where it declares nothing."""
    try:
        with conn.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(DECLARED).fetchone()
    except ABSENT:
        return None
    return None if row is None else Contract(*row)


def require(conn: Connection[Any]) -> None:
    """ContractMismatch where this code may not work with the database behind this connection."""
    judge(read(conn))


async def require_async(conn: AsyncConnection[Any]) -> None:
    """As `require`, for asyncio."""
    try:
        async with conn.cursor(row_factory=tuple_row) as cursor:
            row = await (await cursor.execute(DECLARED)).fetchone()
    except ABSENT:
        row = None
    judge(None if row is None else Contract(*row))


def connect(dsn: str, *, autocommit: bool = False, answer_within: float | None = None) -> Punctual[tuple[Any, ...]]:
    """As `connect.connect`, to a database that this code may work with; else ContractMismatch, before anything is done."""
    made = plain.connect(dsn, autocommit=True, answer_within=answer_within)
    try:
        require(made)
        made.autocommit = autocommit
    except BaseException:
        made.close()
        raise
    return made


async def connect_async(
    dsn: str, *, autocommit: bool = False, answer_within: float | None = None
) -> AsyncPunctual[tuple[Any, ...]]:
    """As `connect`, for asyncio."""
    made = await plain.connect_async(dsn, autocommit=True, answer_within=answer_within)
    try:
        await require_async(made)
        await made.set_autocommit(autocommit)
    except BaseException:
        await made.close()
        raise
    return made
