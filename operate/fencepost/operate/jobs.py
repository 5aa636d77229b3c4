"""`fencepost jobs`: execution, effects and authority of jobs side by side, and the operator's two acts; never a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.progress import progress
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import UnknownJob

app = typer.Typer(no_args_is_help=True, help="Jobs: list, show, cancel, requeue.")

LIMIT_MAX = 10_000
LIST: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec AS state, j.mode, j.reason, j.attempts, j.open_effects, j.owner,
       clock_timestamp() - j.changed_at AS age
FROM fencepost.job AS j
WHERE (%(states)s::text[] IS NULL OR j.exec = ANY (%(states)s::text[]))
  AND (%(tenant)s::text IS NULL OR j.tenant = %(tenant)s::text)
  AND (%(class)s::text IS NULL OR j.class = %(class)s::text)
ORDER BY j.changed_at, j.tenant, j.operation, j.class LIMIT %(limit)s"""
SHOW: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec AS state, j.mode, j.reason, j.detail, j.generation, j.attempts, j.finishes,
       j.epoch, j.accepted_epoch, j.owner, j.attempt, j.done_attempt, j.lease_until, j.run_at, j.priority,
       j.open_effects, j.applied_effects, j.source_event, j.submitted_at, j.changed_at
FROM fencepost.job AS j
WHERE j.tenant = %(tenant)s AND j.operation = %(operation)s AND j.class = %(class)s"""
EFFECTS: LiteralString = """
SELECT e.effect_key AS effect, e.kind, e.state, e.reason, e.version, clock_timestamp() - e.changed_at AS age
FROM fencepost.effect AS e
WHERE e.tenant = %(tenant)s AND e.operation = %(operation)s AND e.class = %(class)s ORDER BY e.begun_at"""

SIGNALS: LiteralString = """
SELECT s.name AS signal, s.key, s.actor, s.login, s.at
FROM fencepost.signal AS s
WHERE s.tenant = %(tenant)s AND s.operation = %(operation)s AND s.class = %(class)s ORDER BY s.n"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str, typer.Option("--tenant")]
Operation = Annotated[str, typer.Option("--operation")]
JobClass = Annotated[str, typer.Option("--class", help="The kind of job.")]
Actor = Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the decision.")]


class StateName(StrEnum):
    """Where a job's execution stands."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    CANCELLED = "cancelled"
    POISON = "poison"
    BLOCKED = "blocked"
    HELD = "held"


@app.callback()
def group() -> None:
    """Jobs: list, show, cancel, requeue."""


@app.command("list")
def list_(
    state: Annotated[list[StateName] | None, typer.Option("--state", help="Only these. Default: all but done.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Done ones too.")] = False,
    tenant: Annotated[str | None, typer.Option("--tenant")] = None,
    job_class: Annotated[str | None, typer.Option("--class")] = None,
    limit: Annotated[int, typer.Option(min=1, max=LIMIT_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """Jobs that are not done, oldest change first."""
    chosen = [s.value for s in state] if state else [s.value for s in StateName if s is not StateName.DONE]
    values = {"states": None if everything else chosen, "tenant": tenant, "class": job_class, "limit": limit}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, values)
    if as_json:
        printing.as_json(rows)
        return
    columns = ("tenant", "operation", "class", "state", "mode", "reason", "attempts", "open_effects", "owner", "age")
    printing.table("jobs", columns, [[r[c] for c in columns] for r in rows], empty="none")


@app.command("show")
def show(tenant: Tenant, operation: Operation, job_class: JobClass, as_json: AsJson = False) -> None:
    """One job: its execution and its effects side by side."""
    which = {"tenant": tenant, "operation": operation, "class": job_class}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found, effects, signals = _rows(conn, SHOW, which), _rows(conn, EFFECTS, which), _rows(conn, SIGNALS, which)
        told = progress(conn, tenant=tenant, operation=operation, job_class=job_class)
    if not found:
        raise UnknownJob("there is no such job", field="operation", hint="check --tenant, --operation and --class")
    if as_json:
        told_of = None if told is None else asdict(told)
        printing.as_json({**found[0], "effects": effects, "signals": signals, "progress": told_of})
        return
    printing.record("job", found[0])
    if told is not None:
        printing.record("progress", asdict(told))
    columns = ("effect", "kind", "state", "reason", "version", "age")
    printing.table("effects", columns, [[r[c] for c in columns] for r in effects], empty="none")
    if signals:
        printing.table("signals", tuple(signals[0]), [list(r.values()) for r in signals], empty="none")


@app.command("cancel")
def cancel_(
    tenant: Tenant,
    operation: Operation,
    job_class: JobClass,
    reason: Reason,
    actor: Actor = None,
    as_json: AsJson = False,
) -> None:
    """Take the job's authority away; its effects keep their state. Exit code 1 when it was done already."""
    with connect(settings.load().dsn()) as conn:
        verdict = cancel(conn, tenant, operation, job_class, actor=actor or login_name(), reason=reason)
    _told(tenant, operation, job_class, verdict, as_json)
    if verdict == "too_late":
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("requeue")
def requeue_(
    tenant: Tenant,
    operation: Operation,
    job_class: JobClass,
    reason: Reason,
    actor: Actor = None,
    as_json: AsJson = False,
) -> None:
    """Give a poison or cancelled job a fresh budget; refused while one of its effects is open."""
    with connect(settings.load().dsn()) as conn:
        requeue(conn, tenant, operation, job_class, actor=actor or login_name(), reason=reason)
    _told(tenant, operation, job_class, "queued", as_json)


def _told(tenant: str, operation: str, job_class: str, became: str, as_json: bool) -> None:
    if as_json:
        printing.as_json({"tenant": tenant, "operation": operation, "class": job_class, "result": became})
    else:
        printing.say(f"{job_class} of operation {operation}: {became}")


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
