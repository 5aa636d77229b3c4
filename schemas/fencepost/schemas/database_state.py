"""What was last seen of the database, in one word, as every health report has it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

__all__ = ["DatabaseState", "looked", "refused"]

ARMED: LiteralString = "SELECT fencepost.armed()"


class DatabaseState(StrEnum):
    """What was last seen of the database.

    disarmed: it answers, and exercises no authority. refused: it answers, and this login may not look.
    unknown: not looked at yet, or too long ago.
    """

    READY = "ready"
    DISARMED = "disarmed"
    UNREACHABLE = "unreachable"
    NOT_MIGRATED = "not_migrated"
    REFUSED = "refused"
    UNKNOWN = "unknown"


def looked(conn: Connection[Any]) -> DatabaseState:
    """Ready or disarmed; raises what looking raised."""
    row = conn.execute(ARMED).fetchone()
    return DatabaseState.READY if row is not None and row[0] is True else DatabaseState.DISARMED


def refused(error: Exception) -> DatabaseState:
    """What an error of looking means."""
    match error:
        case psycopg.errors.UndefinedFunction() | psycopg.errors.UndefinedTable() | psycopg.errors.InvalidSchemaName():
            return DatabaseState.NOT_MIGRATED
        case psycopg.Error() if error.sqlstate is not None and not isinstance(error, psycopg.OperationalError):
            return DatabaseState.REFUSED
        case _:
            return DatabaseState.UNREACHABLE
