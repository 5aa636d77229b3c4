"""`fencepost jobs schedules`: periodic jobs, when each is due next, and forgetting those that no worker's code has any more."""

from __future__ import annotations

from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.schedule import remove
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.findings import Finding, ok, warn
from fencepost.schemas.contract import connect

__all__ = ["app", "on_time"]

app = typer.Typer(no_args_is_help=True, help="Periodic jobs: list, remove.")

LIST: LiteralString = """
SELECT s.schedule, s.class, s.tenant, s.timetable, s.next_at, s.last_at, s.submitted, s.missed, s.missed_count, s.version,
       s.registered_at, s.seen_by, clock_timestamp() - s.seen_at AS seen,
       CASE WHEN s.next_at < clock_timestamp() THEN clock_timestamp() - s.next_at END AS late
FROM fencepost.schedule AS s ORDER BY s.schedule"""
LATE: LiteralString = """
SELECT count(*) FILTER (WHERE s.next_at < clock_timestamp() - interval '1 minute'),
       count(*) FILTER (WHERE s.seen_at < clock_timestamp() - interval '2 minutes'), count(*), min(s.schedule)
FROM fencepost.schedule AS s"""


@app.callback()
def group() -> None:
    """Periodic jobs: list, remove."""


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Every schedule: when it is due next, when it last was, how many instants were missed, and who runs it."""
    with connect(settings.load().dsn(), autocommit=True) as conn, conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(LIST).fetchall()
    if as_json:
        printing.as_json(rows)
        return
    columns = ("schedule", "class", "tenant", "timetable", "next_at", "late", "last_at", "submitted")
    more = ("missed", "missed_count", "version", "seen")
    printing.table("schedules", (*columns, *more), [[r[c] for c in (*columns, *more)] for r in rows], empty="none")


@app.command("remove")
def remove_(
    schedule: Annotated[str, typer.Argument(help="Its name.")],
    why: Annotated[str, typer.Option("--reason-text", help="Why this is done; kept with the decision.")],
    actor: Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")] = None,
) -> None:
    """Forget a schedule that no worker has any more; its jobs stay. Refused while a worker with it is seen."""
    with connect(settings.load().dsn()) as conn:
        remove(conn, schedule, actor=actor or login_name(), reason=why)
    printing.say(f"schedule {schedule} is removed")


def on_time(conn: Connection[Any]) -> Finding:
    """Schedules are submitted when they are due, and somebody runs each."""
    late, unseen, count, _ = conn.execute(LATE).fetchone() or (0, 0, 0, None)
    if late:
        return warn(
            "schedules",
            f"{late} of {count} schedules are overdue; run a worker that has them, see `fencepost jobs schedules list`",
        )
    if unseen:
        return warn(
            "schedules", f"no worker runs {unseen} of {count} schedules; run one, or `fencepost jobs schedules remove`"
        )
    return ok("schedules", f"{count} schedules on time" if count else "no schedules")
