"""`fencepost jobs`: execution, effects and authority of jobs side by side, and the operator's two acts; never a payload."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from psycopg import Connection

from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.progress import progress
from fencepost.operate import job_views, printing, settings
from fencepost.operate.durations import duration
from fencepost.operate.effects import login_name
from fencepost.operate.job_views import Filter, StateName
from fencepost.operate.refusals import ExitCode, code_of, line_of
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import EffectOpen, StaleFence, UnknownJob

app = typer.Typer(no_args_is_help=True, help="Jobs: list, show, retry, cancel; schedules.")

LIMIT_MAX = 10_000
OPEN = tuple(state for state in StateName if state is not StateName.DONE)
LIVING = tuple(state for state in OPEN if state is not StateName.CANCELLED)
COLUMNS = ("tenant", "operation", "class", "status", "reason", "detail", "attempts", "owner", "age")

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str, typer.Option("--tenant")]
Operation = Annotated[str, typer.Option("--operation")]
JobClass = Annotated[str, typer.Option("--class", help="The kind of job.")]
AnyTenant = Annotated[str | None, typer.Option("--tenant")]
AnyOperation = Annotated[str | None, typer.Option("--operation")]
AnyClass = Annotated[str | None, typer.Option("--class", help="The kind of job.")]
Code = Annotated[str | None, typer.Option("--reason", help="The reason code, as list has it.")]
Older = Annotated[str | None, typer.Option("--older-than", help="In this state for longer than this: 10m, 6h, 2d.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=LIMIT_MAX)]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
Why = Annotated[str, typer.Option("--reason-text", help="Why this is done; kept with the decision.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them; needed where nothing narrows it down.")]
Act = Callable[[Connection[Any], str, str, str], str]


@app.callback()
def group() -> None:
    """Jobs: list, show, retry, cancel; schedules."""


@app.command("list")
def list_(
    state: Annotated[list[StateName] | None, typer.Option("--state", help="Only these. Default: all but done.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Done ones too.")] = False,
    tenant: AnyTenant = None,
    operation: AnyOperation = None,
    job_class: AnyClass = None,
    reason: Code = None,
    older_than: Older = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Jobs that are not done, longest in their state first, with what is open of their effects."""
    states = tuple(StateName) if everything else tuple(state or OPEN)
    which = Filter(states, tenant, operation, job_class, reason, duration("older-than", older_than))
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows, cut = job_views.find(conn, which, limit)
    _show(rows, as_json)
    if cut:
        sys.stderr.write(
            f"fencepost: not all were looked at, {job_views.LOOKED_MAX} are the most; name --tenant or --state\n"
        )


@app.command("show")
def show(tenant: Tenant, operation: Operation, job_class: JobClass, as_json: AsJson = False) -> None:
    """One job: its execution, its effects, every attempt, and what else happened to it."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = job_views.one(conn, tenant, operation, job_class)
        archived = found is not None and found["archived_at"] is not None
        effects, attempts, history = job_views.history(conn, tenant, operation, job_class, archived=archived)
        signals = job_views.signals(conn, tenant, operation, job_class, archived=archived)
        told = progress(conn, tenant=tenant, operation=operation, job_class=job_class)
    if found is None:
        raise UnknownJob("there is no such job", field="operation", hint="check --tenant, --operation and --class")
    shown = {"status": job_views.standing(found)} | found
    if as_json:
        told_of = None if told is None else asdict(told)
        more = {"effects": effects, "attempted": attempts, "history": history, "signals": signals, "progress": told_of}
        printing.as_json(shown | more)
        return
    printing.record("job", shown)
    if told is not None:
        printing.record("progress", asdict(told))
    for title, rows in (("effects", effects), ("attempts", attempts), ("history", history), ("signals", signals)):
        printing.table(title, list(rows[0]) if rows else [], [list(row.values()) for row in rows], empty="none")


@app.command("retry")
def retry(
    why: Why,
    tenant: AnyTenant = None,
    operation: AnyOperation = None,
    job_class: AnyClass = None,
    state: Annotated[
        list[StateName] | None, typer.Option("--state", help="poison or cancelled. Default: poison.")
    ] = None,
    reason: Code = None,
    older_than: Older = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Queue poison or cancelled jobs with a fresh budget, each as a decision of its own; refused while an effect is open.

    Exit code 1 when one of them was refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], tenant: str, operation: str, job_class: str) -> str:
        requeue(conn, tenant, operation, job_class, actor=who, reason=why)
        return "queued"

    states = tuple(state or [StateName.POISON])
    if not set(states) <= {StateName.POISON, StateName.CANCELLED}:
        raise typer.BadParameter("only poison and cancelled jobs are queued again")
    which = Filter(states, tenant, operation, job_class, reason, duration("older-than", older_than))
    _each(which, state is None, everything, limit, act, dry_run, as_json)


@app.command("cancel")
def cancel_(
    why: Why,
    tenant: AnyTenant = None,
    operation: AnyOperation = None,
    job_class: AnyClass = None,
    state: Annotated[
        list[StateName] | None, typer.Option("--state", help="Only these. Default: all but done and cancelled.")
    ] = None,
    reason: Code = None,
    older_than: Older = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take jobs' authority away; their effects keep their state. Exit code 1 when one was done already."""
    who = actor or login_name()

    def act(conn: Connection[Any], tenant: str, operation: str, job_class: str) -> str:
        return cancel(conn, tenant, operation, job_class, actor=who, reason=why)

    which = Filter(tuple(state or LIVING), tenant, operation, job_class, reason, duration("older-than", older_than))
    _each(which, state is None, everything, limit, act, dry_run, as_json)


def _each(which: Filter, one: bool, everything: bool, limit: int, act: Act, dry_run: bool, as_json: bool) -> None:
    """Acts on every job in a transaction of its own; a dry run takes the same way and rolls back."""
    if not which.narrow and not everything:
        raise typer.BadParameter("say which: --operation, --class, --tenant, --reason, --older-than, or --all")
    # Named outright it is told what becomes of it, whatever state it is in.
    named = one and bool(which.tenant and which.operation and which.job_class) and not (which.reason or which.older)
    done: list[dict[str, Any]] = []
    worst = ExitCode.DONE
    with connect(settings.load().dsn()) as conn:
        if named:
            rows: list[dict[str, Any]] = [
                {"tenant": which.tenant, "operation": which.operation, "class": which.job_class}
            ]
        else:
            rows, _ = job_views.find(conn, which, limit)
            conn.commit()
        for row in rows:
            key = {name: str(row[name]) for name in ("tenant", "operation", "class")}
            try:
                with conn.transaction(force_rollback=dry_run):
                    result = act(conn, *key.values())
            except (EffectOpen, StaleFence, UnknownJob) as error:
                if named:
                    raise
                result, worst = f"refused: {line_of(error)}", max(worst, code_of(error))
            if result == "too_late":
                worst = max(worst, ExitCode.REFUSED)
            done.append(key | {"result": result})
    if as_json:
        printing.as_json({"dry_run": dry_run, "jobs": done})
    elif named:
        unchanged = "dry run, nothing was changed: " if dry_run else ""
        printing.say(f"{unchanged}{which.job_class} of operation {which.operation}: {done[0]['result']}")
    else:
        title = "dry run, nothing was changed" if dry_run else "jobs"
        printing.table(title, list(done[0]) if done else [], [list(row.values()) for row in done], empty="none")
    if not named and len(rows) == limit:
        sys.stderr.write(f"fencepost: stopped at {limit} jobs; there may be more\n")
    if worst is not ExitCode.DONE:
        raise typer.Exit(int(worst))


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    shown = [{"status": job_views.standing(row)} | row for row in rows]
    if as_json:
        printing.as_json(shown)
        return
    for row in shown:
        row["attempts"] = f"{row['attempts']}/{row['max_attempts'] or '-'}"
    printing.table("jobs", COLUMNS, [[row[c] for c in COLUMNS] for row in shown], empty="none")
