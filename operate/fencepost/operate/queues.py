"""`fencepost jobs pause|resume|queues`: which classes and queues are claimed, and what keeps the others from it."""

from __future__ import annotations

from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.queues import pause, resume
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.findings import Finding, ok, warn
from fencepost.schemas.contract import connect

__all__ = ["pause_", "paused", "queues", "resume_"]

LIST: LiteralString = """
SELECT q.queue, q.class, q.state, q.job_limit, q.running, q.tenant_limit, q.tenants_at_limit, q.fair, q.paused, q.actor,
       q.reason, clock_timestamp() - q.paused_at AS age
FROM fencepost.queues AS q ORDER BY q.queue, q.class"""
PAUSED: LiteralString = """
SELECT h.scope || ' ' || h.name, extract(epoch FROM clock_timestamp() - h.paused_at)::float
FROM fencepost.paused AS h ORDER BY h.paused_at"""
COLUMNS = (
    *("queue", "class", "state", "job_limit", "running", "tenant_limit", "tenants_at_limit", "fair", "paused", "actor"),
    *("reason", "age"),
)

Queue = Annotated[str | None, typer.Option("--queue", help="A queue.")]
JobClass = Annotated[str | None, typer.Option("--class", help="A kind of job.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the decision.")]
Actor = Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")]


def pause_(reason: Reason, queue: Queue = None, job_class: JobClass = None, actor: Actor = None) -> None:
    """Start nothing more of a queue or class; what runs goes on, publishes and ends as ever."""
    with connect(settings.load().dsn()) as conn:
        became = pause(conn, queue=queue, job_class=job_class, actor=actor or login_name(), reason=reason)
    printing.say(f"{_shown(queue, job_class)}: {became}")


def resume_(reason: Reason, queue: Queue = None, job_class: JobClass = None, actor: Actor = None) -> None:
    """Let a paused queue or class be claimed again."""
    with connect(settings.load().dsn()) as conn:
        became = resume(conn, queue=queue, job_class=job_class, actor=actor or login_name(), reason=reason)
    printing.say(f"{_shown(queue, job_class)}: {became}")


def queues(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Registered classes with their queues and limits, and whether they are open, paused or at their limit."""
    with connect(settings.load().dsn(), autocommit=True) as conn, conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(LIST).fetchall()
    if as_json:
        printing.as_json(rows)
    else:
        printing.table("queues", COLUMNS, [[r[c] for c in COLUMNS] for r in rows], empty="no class is registered yet")


def paused(conn: Connection[Any]) -> Finding:
    """Nothing is paused, or what is, and for how long."""
    found = conn.execute(PAUSED).fetchall()
    if not found:
        return ok("queues", "no queue or class is paused")
    shown = ", ".join(f"{what} ({printing.age(age)})" for what, age in found)
    return warn("queues", f"paused: {shown}; see `fencepost jobs queues`")


def _shown(queue: str | None, job_class: str | None) -> str:
    return f"class {job_class}" if queue is None else f"queue {queue}"
