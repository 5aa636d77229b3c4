"""Reconciling: an unknown effect is settled by evidence, once, by somebody who is named; never by a timeout.

Evidence is looked up at the provider under the effect's idempotency key; what was decided, by whom, and where the
evidence can be found again is kept for ever.
"""

from __future__ import annotations

from typing import Any, Literal, LiteralString, cast
from uuid import UUID, uuid4

from psycopg import Connection
from psycopg.rows import tuple_row

__all__ = ["RECONCILE", "EvidenceKind", "Resolved", "Verdict", "reconcile"]

Verdict = Literal["applied", "not_applied"]
EvidenceKind = Literal["receipt_lookup", "provider_statement", "termination_attested", "operator"]
Resolved = Literal["resolved_applied", "resolved_not_applied"]

RECONCILE: LiteralString = """
SELECT fencepost.reconcile(%(tenant)s, %(operation)s, %(effect_key)s, %(version)s, %(verdict)s, %(evidence_kind)s,
                           %(evidence_ref)s, %(receipt)s, %(decision_id)s, %(actor)s, %(reason)s,
                           %(class)s, %(kind)s)"""


def reconcile(
    conn: Connection[Any],
    tenant: str,
    operation: str,
    effect_key: str,
    *,
    version: int,
    verdict: Verdict,
    evidence_kind: EvidenceKind,
    evidence_ref: str,
    actor: str,
    reason: str,
    receipt: str | None = None,
    decision_id: UUID | None = None,
    job_class: str | None = None,
    kind: Literal["keyed", "lookup", "opaque"] = "opaque",
) -> Resolved:
    """Settles the effect in the caller's transaction; a job that waited for it is queued again.

    ``version`` is the one that was looked at. Applied needs the ``receipt``. Not applied is refused (NotQuiescent)
    until the call can no longer be under way, unless the worker's end is attested or the effect is keyed. The same
    ``decision_id`` again, word for word, changes nothing and returns the same. After a restore an effect of a suspect job
    of which nothing is known is settled too, as version 0, of that ``kind``; ``job_class`` where the operation has several. Raises NotUnknown, WrongVersion,
    EvidenceMissing naming the field, OperationConflict when the id stands for another decision, NotArmed.
    """
    parameters = {
        "tenant": tenant,
        "operation": operation,
        "effect_key": effect_key,
        "version": version,
        "verdict": verdict,
        "evidence_kind": evidence_kind,
        "evidence_ref": evidence_ref,
        "receipt": receipt,
        "decision_id": decision_id or uuid4(),
        "actor": actor,
        "reason": reason,
        "class": job_class,
        "kind": kind,
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(RECONCILE, parameters).fetchone()
    assert row is not None
    return cast(Resolved, row[0])
