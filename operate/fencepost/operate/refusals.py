"""Every refusal becomes one line that names the field and what to do, and one exit code; never a traceback.

A database's own errors are told by their primary message only: details and contexts may quote rows or parameters.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import psycopg
import typer
from typer.core import TyperGroup

from fencepost.schemas.errors import ConfigError, Damaged, FencepostError, NotDispatched, Unresolved

__all__ = ["ExitCode", "RefusingGroup", "code_of", "line_of", "refuse"]

REFUSALS = (FencepostError, psycopg.Error)


class ExitCode(IntEnum):
    """What a shell sees of a command."""

    DONE = 0
    REFUSED = 1
    WRONG_SETTING = 2
    UNREACHABLE = 3
    UNKNOWN_OUTCOME = 4


def code_of(error: BaseException) -> ExitCode:
    """The exit code for an error, grouped by what the caller must do."""
    match error:
        case ConfigError():
            return ExitCode.WRONG_SETTING
        case Unresolved():
            return ExitCode.UNKNOWN_OUTCOME
        case NotDispatched():
            return ExitCode.UNREACHABLE
        case Damaged() | FencepostError():
            return ExitCode.REFUSED
        case psycopg.OperationalError() if error.sqlstate is None:
            return ExitCode.UNREACHABLE
        case _:
            return ExitCode.REFUSED


def line_of(error: BaseException) -> str:
    """One line about an error, without anything that a server or a driver may have quoted."""
    if isinstance(error, FencepostError):
        return " ".join(str(error).split())
    if isinstance(
        error, psycopg.errors.UndefinedFunction | psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName
    ):
        return "this database has no fencepost schema of this version [database]; run `fencepost migrate`"
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return f"{error.diag.message_primary} [database]; use a login that was granted the role for this command"
    if isinstance(error, psycopg.Error):
        primary = error.diag.message_primary
        return (
            f"{primary} [{error.sqlstate}]" if primary else f"the database connection failed ({type(error).__name__})"
        )
    return type(error).__name__


def refuse(error: BaseException) -> typer.Exit:
    """Prints the line and gives what to raise."""
    sys.stderr.write(f"fencepost: {line_of(error)}\n")
    return typer.Exit(int(code_of(error)))


class RefusingGroup(TyperGroup):
    """A group of commands whose refusals are told, not thrown."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; a typed refusal ends it with its line and code."""
        try:
            return super().invoke(ctx)
        except REFUSALS as error:
            raise refuse(error) from None
