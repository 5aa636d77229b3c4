"""`fencepost jobs retention` and `fencepost jobs purge`: how long finished jobs stay as they are, and their archive."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.archive import Archiving, drop_archives, keep_archive, keep_finished
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.operate.effects import login_name
from fencepost.operate.findings import Finding, ok, warn
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

COUNT_MAX = 1_000_000
CLASSES: LiteralString = """
SELECT r.class, r.finished_keep, r.passed_at FROM fencepost.job_retention AS r
WHERE %(class)s::text IS NULL OR r.class = %(class)s::text ORDER BY r.class"""
KEPT: LiteralString = "SELECT r.archive_keep FROM fencepost.archive_retention AS r"
FINISHED: LiteralString = "SELECT f.class, f.jobs, f.oldest FROM fencepost.finished_jobs(%(most)s) AS f"
# Whoever walks through the finished jobs ends a walk again and again.
OVERDUE: LiteralString = """
SELECT r.class FROM fencepost.job_retention AS r
WHERE greatest(r.passed_at, r.changed_at) < clock_timestamp() - interval '1 day' ORDER BY r.class"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def retention(
    job_class: Annotated[str | None, typer.Option("--class", help="The kind of job.")] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", help="How long done and cancelled jobs of this class stay: 30d, 12h.")
    ] = None,
    forever: Annotated[bool, typer.Option("--forever", help="They stay, as where nothing is declared.")] = False,
    archive: Annotated[
        str | None, typer.Option("--archive", help="How long the archive keeps what it was given: 365d.")
    ] = None,
    archive_forever: Annotated[bool, typer.Option("--archive-forever", help="The archive keeps everything.")] = False,
    reason: Annotated[str | None, typer.Option(help="Why; kept with the decision.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how long finished jobs stay, by class, and how long their archive does; with an option, change it."""
    jobs, months = _one("keep", keep, forever), _one("archive", archive, archive_forever)
    who = actor or login_name()
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if jobs is not None or months is not None:
            if reason is None:
                raise InvalidInput("a change needs a reason", field="reason", hint="give --reason")
            with conn.transaction():
                if jobs is not None:
                    if job_class is None:
                        raise InvalidInput("a change is for one class", field="class", hint="give --class")
                    keep_finished(conn, job_class, jobs[0], actor=who, reason=reason)
                if months is not None:
                    keep_archive(conn, months[0], actor=who, reason=reason)
        rows = _rows(conn, CLASSES, {"class": job_class})
        kept = _rows(conn, KEPT, {})
    archive_keep = kept[0]["archive_keep"] if kept else None
    if as_json:
        printing.as_json({"classes": rows, "archive_keep": archive_keep})
        return
    cells = [[r["class"], r["finished_keep"], r["passed_at"]] for r in rows]
    empty = "nothing is declared: finished jobs stay for ever"
    printing.table("retention", ("class", "finished_stay", "last_walk"), cells, empty=empty)
    printing.say(f"the archive keeps what it was given {'for ever' if archive_keep is None else f'for {archive_keep}'}")


def purge(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move finished jobs that are older than their class keeps them into the archive, and drop months that are over.

    What is open stays: waiting, blocked, held and poison jobs, and those with an effect that is pending or unknown. The
    identity of an archived job stays for ever: the same operation is never taken for new.
    """
    found: list[dict[str, Any]] = []
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if dry_run:
            found = _rows(conn, FINISHED, {"most": COUNT_MAX})
            moved, months = sum(int(r["jobs"]) for r in found), drop_archives(conn, dry_run=True)
        else:
            walk = Archiving()
            moved = walk.turn(conn, seconds=float("inf"))
            months = walk.dropped
    if as_json:
        printing.as_json(
            {"dry_run": dry_run, "jobs": moved, "months": months} | ({"classes": found} if dry_run else {})
        )
        return
    title = "dry run, nothing was changed" if dry_run else "purged"
    printing.record(title, {"jobs": moved, "months_of_the_archive": ", ".join(months) or "none"})
    if dry_run:
        columns = ("class", "jobs", "oldest")
        empty = "nothing is declared: they stay for ever"
        printing.table("finished jobs", columns, [[r[c] for c in columns] for r in found], empty=empty)


def archiving(conn: Connection[Any]) -> Finding:
    """Somebody archives finished jobs where that is declared."""
    overdue = [str(r["class"]) for r in _rows(conn, OVERDUE, {})]
    if overdue:
        return warn(
            "archive",
            f"nobody archives finished jobs of {', '.join(overdue[:5])}: run `fencepost jobs purge`, or a worker with a"
            " login that has the role maintenance",
        )
    return ok("archive", "finished jobs are archived wherever that is declared")


def _one(field: str, given: str | None, forever: bool) -> tuple[timedelta | None] | None:
    """The time that was given, None in a tuple for ever, None for no change."""
    if given is not None and forever:
        raise InvalidInput("for ever, and a time", field=field, hint="give one of them")
    return (None,) if forever else None if given is None else (duration(field, given),)


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
