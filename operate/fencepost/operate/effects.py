"""`fencepost effects`: what was asked of providers, what is not known, and settling it by evidence; never a payload."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.reconcile import reconcile
from fencepost.operate import printing, settings
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import InvalidInput, NotUnknown

app = typer.Typer(no_args_is_help=True, help="External effects: list, show, and reconcile by evidence.")

LIMIT_MAX = 10_000
LIST: LiteralString = """
SELECT e.tenant, e.operation, e.effect_key AS effect, e.class, e.kind, e.state, e.reason, e.assignee, e.version, e.begins,
       e.changed_at, clock_timestamp() - e.changed_at AS age
FROM fencepost.effect AS e
WHERE (%(states)s::text[] IS NULL OR e.state = ANY (%(states)s::text[]))
  AND (%(tenant)s::text IS NULL OR e.tenant = %(tenant)s::text)
ORDER BY e.changed_at, e.tenant, e.operation, e.effect_key LIMIT %(limit)s"""
SHOW: LiteralString = """
SELECT e.tenant, e.operation, e.effect_key AS effect, e.class, e.kind, e.state, e.reason, e.contradicted, e.assignee,
       e.version, e.begins, e.begun_at, e.dispatch_deadline, e.quiescent_at, e.receipt, e.decision_id, e.changed_at,
       e.begun_by AS attempt, e.effect_attempt
FROM fencepost.effect AS e
WHERE e.tenant = %(tenant)s AND e.operation = %(operation)s AND e.effect_key = %(effect)s"""
HISTORY: LiteralString = """
SELECT h.at, h.was, h.became, h.reason, h.receipt, h.version, h.login FROM fencepost.effect_event AS h
WHERE h.tenant = %(tenant)s AND h.operation = %(operation)s AND h.effect_key = %(effect)s ORDER BY h.id"""
DECISIONS: LiteralString = """
SELECT d.at, d.verdict, d.actor, d.reason, d.evidence_kind, d.evidence_ref FROM fencepost.decision AS d
WHERE d.kind = 'reconcile' AND d.tenant = %(tenant)s AND d.operation = %(operation)s AND d.subject = %(effect)s
ORDER BY d.id"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str, typer.Option("--tenant")]
Operation = Annotated[str, typer.Option("--operation")]
Effect = Annotated[str, typer.Option("--effect", help="The effect key.")]


class VerdictName(StrEnum):
    """What the evidence says."""

    APPLIED = "applied"
    NOT_APPLIED = "not-applied"


class EvidenceName(StrEnum):
    """Where the evidence comes from."""

    RECEIPT_LOOKUP = "receipt_lookup"
    PROVIDER_STATEMENT = "provider_statement"
    TERMINATION_ATTESTED = "termination_attested"
    OPERATOR = "operator"


class StateName(StrEnum):
    """States of an effect."""

    PENDING = "pending"
    SUCCESS = "success"
    FAILED_BEFORE_DISPATCH = "failed_before_dispatch"
    UNKNOWN = "unknown"
    RESOLVED_APPLIED = "resolved_applied"
    RESOLVED_NOT_APPLIED = "resolved_not_applied"


@app.callback()
def group() -> None:
    """External effects: list, show, and reconcile by evidence."""


@app.command("list")
def list_(
    state: Annotated[
        list[StateName] | None, typer.Option("--state", help="Only these. Default: pending, unknown.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every state.")] = False,
    tenant: Annotated[str | None, typer.Option("--tenant")] = None,
    limit: Annotated[int, typer.Option(min=1, max=LIMIT_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """Effects that are open (pending or unknown), oldest first."""
    chosen = [s.value for s in state] if state else ["pending", "unknown"]
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, {"states": None if everything else chosen, "tenant": tenant, "limit": limit})
    if as_json:
        printing.as_json(rows)
        return
    columns = ("tenant", "operation", "effect", "class", "kind", "state", "reason", "version", "age")
    printing.table("effects", columns, [[r[c] for c in columns] for r in rows], empty="none")


@app.command("show")
def show(tenant: Tenant, operation: Operation, effect: Effect, as_json: AsJson = False) -> None:
    """One effect with its history, its decisions, and the command that would settle it."""
    which = {"tenant": tenant, "operation": operation, "effect": effect}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = _rows(conn, SHOW, which)
        history, decisions = _rows(conn, HISTORY, which), _rows(conn, DECISIONS, which)
    if not found:
        raise NotUnknown("there is no such effect", field="effect", hint="check --tenant, --operation and --effect")
    if as_json:
        printing.as_json({**found[0], "history": history, "decisions": decisions})
        return
    printing.record("effect", found[0])
    columns = ("at", "was", "became", "reason", "receipt", "version", "login")
    printing.table("history", columns, [[r[c] for c in columns] for r in history], empty="none")
    evidence = ("at", "verdict", "actor", "reason", "evidence_kind", "evidence_ref")
    printing.table("decisions", evidence, [[r[c] for c in evidence] for r in decisions], empty="none")
    if found[0]["state"] == "unknown":
        words = (
            "--tenant",
            tenant,
            "--operation",
            operation,
            "--effect",
            effect,
            "--version",
            str(found[0]["version"]),
        )
        printing.say(f"to settle it: fencepost effects reconcile {shlex.join(words)} --verdict applied|not-applied \\")
        printing.say(
            "    --evidence-kind receipt_lookup --evidence-ref WHERE [--receipt RECEIPT] --actor YOU --reason WHY"
        )


@app.command("reconcile")
def reconcile_(
    tenant: Tenant,
    operation: Operation,
    effect: Effect,
    version: Annotated[int, typer.Option(help="The version that was looked at.")],
    verdict: Annotated[VerdictName, typer.Option(help="Did the provider do it?")],
    evidence_kind: Annotated[EvidenceName, typer.Option("--evidence-kind", help="Where the evidence comes from.")],
    evidence_ref: Annotated[str, typer.Option("--evidence-ref", help="Where the evidence can be found again.")],
    receipt: Annotated[str | None, typer.Option(help="The provider's receipt; needed for applied.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")] = None,
    reason: Annotated[str | None, typer.Option(help="Why. Default: the kind of evidence.")] = None,
    as_json: AsJson = False,
) -> None:
    """Settle an unknown effect by evidence, once; its job is queued again. The decision is kept for ever."""
    with connect(settings.load().dsn()) as conn:
        became = reconcile(
            conn,
            tenant,
            operation,
            effect,
            version=version,
            verdict="applied" if verdict is VerdictName.APPLIED else "not_applied",
            evidence_kind=evidence_kind.value,
            evidence_ref=evidence_ref,
            actor=actor or login_name(),
            reason=reason or f"evidence: {evidence_kind.value}",
            receipt=receipt,
        )
    if as_json:
        printing.as_json({"tenant": tenant, "operation": operation, "effect": effect, "state": became})
    else:
        printing.say(f"effect {effect} of operation {operation} is {became}")


def login_name() -> str:
    """Who runs this command, or InvalidInput where the system does not know."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise InvalidInput("the login name is not known", field="actor", hint="give --actor") from None


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
