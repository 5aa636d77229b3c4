"""`fencepost effects`: what was asked of providers, what is not known, whose that is, and settling it by evidence.

Never a payload. Every act is a decision with an id: repeated word for word under it, it changes nothing.
"""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, LiteralString
from uuid import UUID, uuid4

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs.effects import attempt_key, idempotency_key
from fencepost.jobs.escalation import assign
from fencepost.jobs.reconcile import reconcile
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput, NotUnknown

app = typer.Typer(no_args_is_help=True, help="External effects: list, show, assign, and reconcile by evidence.")

LIMIT_MAX = 10_000
LIST: LiteralString = """
SELECT e.tenant, e.operation, e.effect_key AS effect, e.class, e.kind, e.state, e.reason, e.severity, e.assignee, e.version,
       e.begins, e.changed_at, e.unknown_since, clock_timestamp() - coalesce(e.unknown_since, e.changed_at) AS age
FROM fencepost.effect AS e
WHERE (%(states)s::text[] IS NULL OR e.state = ANY (%(states)s::text[]))
  AND (%(tenant)s::text IS NULL OR e.tenant = %(tenant)s::text)
  AND (%(class)s::text IS NULL OR e.class = %(class)s::text)
  AND (%(assignee)s::text IS NULL OR e.assignee = %(assignee)s::text)
  AND (%(severity)s::text IS NULL OR e.state = 'unknown' AND e.severity = %(severity)s::text)
  AND (%(older)s::interval IS NULL OR coalesce(e.unknown_since, e.changed_at) < clock_timestamp() - %(older)s::interval)
ORDER BY coalesce(e.unknown_since, e.changed_at), e.tenant, e.operation, e.effect_key LIMIT %(limit)s"""
SHOW: LiteralString = """
SELECT e.tenant, e.operation, e.effect_key AS effect, e.class, e.kind, e.state, e.reason, e.contradicted, e.assignee,
       e.severity, e.unknown_since, e.escalations, e.version, e.begins, e.begun_at, e.dispatch_deadline, e.quiescent_at,
       e.receipt, e.decision_id, e.changed_at, e.begun_by AS attempt, e.effect_attempt
FROM fencepost.effect AS e
WHERE e.tenant = %(tenant)s AND e.operation = %(operation)s AND e.effect_key = %(effect)s"""
HISTORY: LiteralString = """
SELECT h.at, h.was, h.became, h.reason, h.receipt, h.severity, h.assignee, h.version, h.login FROM fencepost.effect_event AS h
WHERE h.tenant = %(tenant)s AND h.operation = %(operation)s AND h.effect_key = %(effect)s ORDER BY h.id"""
DECISIONS: LiteralString = """
SELECT d.at, d.kind, d.verdict, d.version, d.actor, d.reason, d.evidence_kind, d.evidence_ref, d.receipt, d.decision_id, d.login
FROM fencepost.decision AS d
WHERE d.kind IN ('reconcile', 'assign')
  AND d.tenant = %(tenant)s AND d.operation = %(operation)s AND d.subject = %(effect)s
ORDER BY d.id"""
LOOKUP: LiteralString = """
SELECT l.asks, l.answer, l.answered_at, l.due_at FROM fencepost.lookup AS l
WHERE l.tenant = %(tenant)s AND l.operation = %(operation)s AND l.effect_key = %(effect)s"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str, typer.Option("--tenant")]
Operation = Annotated[str, typer.Option("--operation")]
Effect = Annotated[str, typer.Option("--effect", help="The effect key.")]
Version = Annotated[int, typer.Option("--version", help="The version that was looked at.")]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
DecisionId = Annotated[
    UUID | None, typer.Option("--decision-id", help="Names this decision, to repeat it safely. Default: a new one.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]


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


class SeverityName(StrEnum):
    """How urgent an unknown effect is."""

    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = "critical"


@app.callback()
def group() -> None:
    """External effects: list, show, assign, and reconcile by evidence."""


@app.command("list")
def list_(
    state: Annotated[
        list[StateName] | None, typer.Option("--state", help="Only these. Default: pending, unknown.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every state.")] = False,
    tenant: Annotated[str | None, typer.Option("--tenant")] = None,
    job_class: Annotated[str | None, typer.Option("--class", help="The kind of job.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Unknown, or else unchanged, for longer than this: 10m, 6h, 2d.")
    ] = None,
    assignee: Annotated[str | None, typer.Option("--assignee", help="Whose they are.")] = None,
    severity: Annotated[SeverityName | None, typer.Option("--severity", help="Only unknown ones of this.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=LIMIT_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """Effects that are open (pending or unknown), oldest first."""
    chosen = [s.value for s in state] if state else ["pending", "unknown"]
    values: dict[str, object] = {
        "states": None if everything else chosen,
        "tenant": tenant,
        "class": job_class,
        "older": duration("older-than", older_than),
        "assignee": assignee,
        "severity": None if severity is None else severity.value,
        "limit": limit,
    }
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, values)
    if as_json:
        printing.as_json(rows)
        return
    columns = (
        *(
            "tenant",
            "operation",
            "effect",
            "class",
            "kind",
            "state",
            "reason",
            "severity",
            "assignee",
            "version",
            "age",
        ),
    )
    printing.table("effects", columns, [[r[c] for c in columns] for r in rows], empty="none")


@app.command("show")
def show(tenant: Tenant, operation: Operation, effect: Effect, as_json: AsJson = False) -> None:
    """One effect with its history, its decisions, and the command that would settle it."""
    which = {"tenant": tenant, "operation": operation, "effect": effect}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = _rows(conn, SHOW, which)
        history, decisions = _rows(conn, HISTORY, which), _rows(conn, DECISIONS, which)
        asked = _rows(conn, LOOKUP, which)
    if not found:
        raise NotUnknown("there is no such effect", field="effect", hint="check --tenant, --operation and --effect")
    attempt = found[0]["effect_attempt"]
    # Under which its provider may know it: one key for all its begins, and one of the last begin alone.
    keys = {
        "idempotency_key": idempotency_key(tenant, operation, effect),
        "attempt_key": None if attempt is None else attempt_key(attempt),
    }
    look_up = asked[0] if asked else None
    if as_json:
        printing.as_json({**found[0], **keys, "look_up": look_up, "history": history, "decisions": decisions})
        return
    printing.record("effect", {**found[0], **keys})
    if look_up is not None:
        printing.record("look-up", look_up)
    columns = ("at", "was", "became", "reason", "receipt", "severity", "assignee", "version", "login")
    printing.table("history", columns, [[r[c] for c in columns] for r in history], empty="none")
    evidence = ("at", "kind", "verdict", "actor", "reason", "evidence_kind", "evidence_ref", "receipt", "decision_id")
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
    version: Version,
    verdict: Annotated[VerdictName, typer.Option(help="Did the provider do it?")],
    evidence_kind: Annotated[EvidenceName, typer.Option("--evidence-kind", help="Where the evidence comes from.")],
    evidence_ref: Annotated[str, typer.Option("--evidence-ref", help="Where the evidence can be found again.")],
    receipt: Annotated[str | None, typer.Option(help="The provider's receipt; needed for applied.")] = None,
    actor: Actor = None,
    reason: Annotated[str | None, typer.Option(help="Why. Default: the kind of evidence.")] = None,
    decision_id: DecisionId = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Settle an unknown effect by evidence, once; its job is queued again. The decision is kept for ever.

    Before its quiescence "not-applied" is refused: look again after it, what was seen earlier may have been overtaken.
    """
    decision = decision_id or uuid4()
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
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
            decision_id=decision,
        )
    _told(tenant, operation, effect, {"state": str(became)}, f"is {became}", decision, dry_run, as_json)


@app.command("assign")
def assign_(
    tenant: Tenant,
    operation: Operation,
    effect: Effect,
    version: Version,
    assignee: Annotated[str, typer.Option(help="Whose it is from now on.")],
    reason: Annotated[str, typer.Option(help="Why; kept with the decision.")],
    severity: Annotated[SeverityName | None, typer.Option(help="How urgent it is. Default: as it was.")] = None,
    actor: Actor = None,
    decision_id: DecisionId = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give an unknown effect to somebody; it stays as unknown as it was, and escalates as before."""
    decision = decision_id or uuid4()
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        assign(
            conn,
            tenant,
            operation,
            effect,
            version=version,
            assignee=assignee,
            severity=None if severity is None else severity.value,
            actor=actor or login_name(),
            reason=reason,
            decision_id=decision,
        )
    _told(tenant, operation, effect, {"assignee": assignee}, f"is now {assignee}'s", decision, dry_run, as_json)


def login_name() -> str:
    """Who runs this command, or InvalidInput where the system does not know."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise InvalidInput("the login name is not known", field="actor", hint="give --actor") from None


def _told(
    tenant: str,
    operation: str,
    effect: str,
    became: dict[str, str],
    words: str,
    decision: UUID,
    dry_run: bool,
    as_json: bool,
) -> None:
    if as_json:
        which = {"tenant": tenant, "operation": operation, "effect": effect}
        printing.as_json({**which, **became, "decision_id": decision, "dry_run": dry_run})
        return
    printing.say(
        f"{'dry run, nothing was changed: ' if dry_run else ''}effect {effect} of operation {operation} {words}"
    )


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
