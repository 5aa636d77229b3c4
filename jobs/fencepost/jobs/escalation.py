"""Escalation: every unknown effect is somebody's from its first moment, and grows in severity with its age; never resolved by it.

A worker registers the policy of its classes; the database applies it, whoever made the effect unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, LiteralString, cast
from uuid import UUID, uuid4

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.lookup import ReceiptLookup
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_class, as_text

__all__ = [
    "ASSIGN",
    "BY_OPERATORS",
    "ESCALATE",
    "REGISTER",
    "Escalation",
    "Reconciliation",
    "Severity",
    "assign",
    "escalate",
    "register",
]

Severity = Literal["normal", "high", "critical"]

REGISTER: LiteralString = """
SELECT fencepost.set_escalation(%(class)s, %(assignee)s, %(after)s::interval[], %(severity)s::text[], %(to)s::text[])"""
ESCALATE: LiteralString = "SELECT fencepost.escalate_effects(%(limit)s)"
ASSIGN: LiteralString = """
SELECT fencepost.assign_effect(%(tenant)s, %(operation)s, %(effect_key)s, %(version)s, %(assignee)s, %(severity)s,
                               %(decision_id)s, %(actor)s, %(reason)s)"""


@dataclass(frozen=True, slots=True)
class Escalation:
    """One step: ``after`` seconds unknown, an effect is at least of this severity, and ``assignee``'s (None: as before)."""

    after: float
    severity: Severity = "high"
    assignee: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.after) or self.after <= 0:
            raise InvalidInput("after is not a positive number of seconds", field="escalate")
        if self.assignee is not None:
            as_text(self.assignee, "assignee")


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Whose the unknown effects of a class are, how they escalate, and how their receipts are looked up.

    ``look_up`` is asked about effects of kind lookup and keyed while they are unknown; without one they wait for people,
    as effects of kind opaque always do. Steps of ``escalate`` are in the order of their age.
    """

    assignee: str = "operator"
    escalate: Sequence[Escalation] = (Escalation(3600.0, "high"), Escalation(86_400.0, "critical"))
    look_up: ReceiptLookup | None = None

    def __post_init__(self) -> None:
        as_text(self.assignee, "assignee")
        ages = [step.after for step in self.escalate]
        if ages != sorted(set(ages)):
            raise InvalidInput("escalation steps are not in the order of their age", field="escalate")


BY_OPERATORS = Reconciliation()
"""Unknown effects are the operators', high after an hour and critical after a day; nothing is looked up by itself."""


def register(conn: Connection[Any], job_class: str, policy: Reconciliation) -> None:
    """Sets the policy of a registered class, in the caller's transaction; effects that are unknown already follow it too."""
    conn.execute(
        REGISTER,
        {
            "class": as_class(job_class),
            "assignee": policy.assignee,
            "after": [timedelta(seconds=step.after) for step in policy.escalate],
            "severity": [step.severity for step in policy.escalate],
            "to": [step.assignee for step in policy.escalate],
        },
    )


def escalate(conn: Connection[Any], *, limit: int = 500) -> int:
    """Takes the steps that are due for at most ``limit`` unknown effects, and says for how many; resolves nothing.

    What others hold at the moment is left for the next time. Raises NotArmed.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(ESCALATE, {"limit": limit}).fetchone()
    assert row is not None
    return cast(int, row[0])


def assign(
    conn: Connection[Any],
    tenant: str,
    operation: str,
    effect_key: str,
    *,
    version: int,
    assignee: str,
    actor: str,
    reason: str,
    severity: Severity | None = None,
    decision_id: UUID | None = None,
) -> None:
    """Gives an unknown effect to somebody, in the caller's transaction; its state and version stay, the decision is kept.

    ``version`` is the one that was looked at. The same ``decision_id`` again, word for word, changes nothing. Raises
    NotUnknown, WrongVersion, OperationConflict when the id stands for another decision, NotArmed.
    """
    conn.execute(
        ASSIGN,
        {
            "tenant": tenant,
            "operation": operation,
            "effect_key": effect_key,
            "version": version,
            "assignee": assignee,
            "severity": severity,
            "decision_id": decision_id or uuid4(),
            "actor": actor,
            "reason": reason,
        },
    )
