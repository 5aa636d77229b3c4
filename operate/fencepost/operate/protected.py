"""`fencepost jobs protect|unprotect|protected`: tables whose rows are written behind a fence only."""

from __future__ import annotations

from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.protect import protect, unprotect
from fencepost.operate import printing, settings
from fencepost.operate.findings import Finding, fail, ok
from fencepost.operate.refusals import ExitCode
from fencepost.schemas.contract import connect

__all__ = ["protect_", "protected", "unprotect_", "whole"]

LIST: LiteralString = """
SELECT p.relation AS table, p.tenant_column, p.operation_column, p.protected_by, p.protected_at, p.fault
FROM fencepost.protection() AS p"""
COLUMNS = ("table", "tenant_column", "operation_column", "protected_by", "fault")

Table = Annotated[str, typer.Argument(help="The table, with its schema.")]


def protect_(
    table: Table,
    tenant: Annotated[str, typer.Option("--tenant-column", help="The column that names the tenant.")] = "tenant",
    operation: Annotated[
        str, typer.Option("--operation-column", help="The column that names the operation.")
    ] = "operation",
) -> None:
    """Let PostgreSQL refuse every write of this table that is not behind a fence; by its owner."""
    with connect(settings.load().dsn()) as conn:
        protect(conn, table, tenant=tenant, operation=operation)
    printing.say(f"{table}: protected")


def unprotect_(table: Table) -> None:
    """Take the protection of this table off; by its owner."""
    with connect(settings.load().dsn()) as conn:
        unprotect(conn, table)
    printing.say(f"{table}: no longer protected")


def protected(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Protected tables and what is wrong with their protection; exit code 1 when something is."""
    with connect(settings.load().dsn(), autocommit=True) as conn, conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(LIST).fetchall()
    if as_json:
        printing.as_json(rows)
    else:
        printing.table("protected tables", COLUMNS, [[r[c] for c in COLUMNS] for r in rows], empty="none")
    if any(r["fault"] for r in rows):
        raise typer.Exit(int(ExitCode.REFUSED))


def whole(conn: Connection[Any]) -> Finding:
    """Every protected table is protected still, partitions that came later included."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(LIST).fetchall()
    if wrong := [f"{r['table']}: {r['fault']}" for r in rows if r["fault"]]:
        return fail("protected", f"{'; '.join(wrong)}; let the owner protect it again: fencepost jobs protect")
    return ok("protected", f"{len(rows)} tables are written behind a fence only")
