"""`fencepost jobs owner`: which implementation owns the lifecycle of each class, and handing a class over or taking it back."""

from __future__ import annotations

from typing import Annotated, LiteralString

import typer
from psycopg.rows import dict_row

from fencepost.jobs.authority import By
from fencepost.jobs.lifecycle import FENCEPOST, hand_over
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.schemas.contract import connect

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Who claims, retries, reaps and completes a class: show, hand-over, take-back."
)

LIST: LiteralString = """
SELECT k.class, coalesce(l.implementation, 'fencepost') AS owner, l.since,
       count(*) FILTER (WHERE j.exec = 'queued') AS queued, count(*) FILTER (WHERE j.exec = 'running') AS running,
       count(*) FILTER (WHERE j.exec = 'waiting') AS waiting,
       count(*) FILTER (WHERE j.exec = 'cancelled' AND j.reason = 'transferred') AS transferred
FROM fencepost.job_class AS k
LEFT JOIN fencepost.lifecycle AS l ON l.class = k.class
LEFT JOIN fencepost.job AS j ON j.class = k.class AND j.exec <> 'done'
GROUP BY k.class, l.implementation, l.since ORDER BY k.class"""
COLUMNS = ("class", "owner", "since", "queued", "running", "waiting", "transferred")

JobClass = Annotated[str, typer.Option("--class", help="The kind of job.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the history.")]
Evidence = Annotated[str, typer.Option("--evidence", help="Where it can be seen that the owner until now has stopped.")]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
Version = Annotated[int | None, typer.Option("--expect-version", help="The version that `authority status` showed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.callback()
def group() -> None:
    """Who claims, retries, reaps and completes a class."""


@app.command("show")
def show(as_json: AsJson = False) -> None:
    """Every class, whose it is, and how many of its jobs are here or with its owner."""
    with connect(settings.load().dsn(), autocommit=True) as conn, conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(LIST).fetchall()
    if as_json:
        printing.as_json(rows)
    else:
        printing.table("owners", COLUMNS, [[r[c] for c in COLUMNS] for r in rows], empty="no class is registered yet")


@app.command("hand-over")
def hand_over_(
    job_class: JobClass,
    to: Annotated[str, typer.Option("--to", help="The implementation that owns the class from now on.")],
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a class to another implementation; refused while its jobs run or an effect is open. Drain it first: jobs pause."""
    _hand(job_class, to, By(actor or login_name(), reason, evidence, expect_version), dry_run, as_json)


@app.command("take-back")
def take_back(
    job_class: JobClass,
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let fencepost own a class again, once the other implementation has stopped and given back what it took over."""
    _hand(job_class, FENCEPOST, By(actor or login_name(), reason, evidence, expect_version), dry_run, as_json)


def _hand(job_class: str, to: str, by: By, dry_run: bool, as_json: bool) -> None:
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        was = hand_over(conn, by, job_class, to=to)
    if as_json:
        printing.as_json({"class": job_class, "from": was, "to": to, "dry_run": dry_run})
    else:
        printing.say(f"{'dry run, nothing was changed: ' if dry_run else ''}class {job_class}: from {was} to {to}")
