"""Looking up receipts: what a provider's adapter is asked about an unknown effect, and what its answer does.

An answer settles the effect through the same decision as an operator's, with evidence of kind ``receipt_lookup``. A
negative one counts only when the question was asked after the call could no longer be under way.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString, Protocol, cast
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.effects import Kind, attempt_key, idempotency_key
from fencepost.jobs.reconcile import Resolved, Verdict
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import EffectAttempt, EffectKey, JobClass, OperationId, Tenant, as_name

__all__ = [
    "DEFER",
    "SETTLE",
    "TAKE",
    "Answer",
    "Asked",
    "DidNotHappen",
    "Inconclusive",
    "Landed",
    "ReceiptLookup",
    "Taken",
    "defer",
    "settle",
    "take",
]

REFERENCE_CHARS_MAX = 2000

TAKE: LiteralString = """
SELECT tenant, operation, effect_key, class, kind, effect_attempt, version, asks, begun_at, quiescent_ms
FROM fencepost.take_lookups(%(classes)s::text[], %(taken_by)s::uuid, %(limit)s, %(lease)s::interval)"""
SETTLE: LiteralString = """
SELECT fencepost.settle_lookup(%(tenant)s, %(operation)s, %(effect_key)s, %(taken_by)s, %(version)s, %(verdict)s,
                               %(evidence_ref)s, %(receipt)s, %(decision_id)s, %(actor)s)"""
DEFER: LiteralString = """
SELECT fencepost.defer_lookup(%(tenant)s, %(operation)s, %(effect_key)s, %(taken_by)s, %(answer)s, %(delay)s::interval)"""


@dataclass(frozen=True, slots=True)
class Landed:
    """The provider did it: its receipt, and where the evidence can be found again (default: under the receipt)."""

    receipt: str
    evidence_ref: str = ""

    def __post_init__(self) -> None:
        _required(self.receipt, "receipt")
        if not self.evidence_ref:
            object.__setattr__(self, "evidence_ref", self.receipt)
        _required(self.evidence_ref, "evidence_ref")


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """The provider knows for certain that it did not do it, and where that can be found again; "not found yet" is not that."""

    evidence_ref: str

    def __post_init__(self) -> None:
        _required(self.evidence_ref, "evidence_ref")


@dataclass(frozen=True, slots=True)
class Inconclusive:
    """The answer settles nothing; ``reason`` is a code. Asked again later."""

    reason: str = "inconclusive"

    def __post_init__(self) -> None:
        as_name(self.reason, "reason")


Answer = Landed | DidNotHappen | Inconclusive


@dataclass(frozen=True, slots=True)
class Asked:
    """One unknown effect: under which keys its provider may know it, and until when an answer is waited for.

    ``idempotency_key`` is what every begin of the effect had in common, ``request_key`` what `http_effect` sent.
    ``effect_attempt`` is None where a restore has lost which begin it was: only keyed effects are asked about then.
    """

    tenant: Tenant
    operation: OperationId
    effect_key: EffectKey
    job_class: JobClass
    kind: Kind
    effect_attempt: EffectAttempt | None
    begun_at: datetime
    asks: int
    deadline: float = field(compare=False)

    @property
    def idempotency_key(self) -> str:
        """The key that is the same for every begin of this effect."""
        return idempotency_key(self.tenant, self.operation, self.effect_key)

    @property
    def request_key(self) -> str:
        """The key that the unknown begin sent, as ``Dispatch.request_key``."""
        if self.kind == "keyed":
            return self.idempotency_key
        if self.effect_attempt is None:
            raise InvalidInput("nobody knows under which key the call was sent", field="effect_attempt")
        return attempt_key(self.effect_attempt)

    def seconds_left(self) -> float:
        """Seconds for which an answer is waited for, at least 0; a later one counts as inconclusive."""
        return max(0.0, self.deadline - time.monotonic())


class ReceiptLookup(Protocol):
    """Asks a provider what became of an effect; only reads there. Plain or async; whatever it raises is inconclusive."""

    def __call__(self, asked: Asked, /) -> Answer | Awaitable[Answer]: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A question that is this worker's for the length of its lease; a negative answer counts once ``quiescent_in`` is 0."""

    asked: Asked
    taken_by: UUID
    version: int
    quiescent_in: float

    def parameters(self) -> dict[str, object]:
        """What names it in the database."""
        asked = self.asked
        return {
            "tenant": asked.tenant,
            "operation": asked.operation,
            "effect_key": asked.effect_key,
            "taken_by": self.taken_by,
        }


def take(
    conn: Connection[Any], classes: Sequence[str], taken_by: UUID, *, limit: int, lease: float, patience: float
) -> list[Taken]:
    """Leases at most ``limit`` due questions for ``lease`` seconds, in the caller's transaction: commit, then ask.

    ``patience`` is for how many seconds from now an answer is waited for. Raises NotArmed.
    """
    deadline = time.monotonic() + patience
    values = {"classes": list(classes), "taken_by": taken_by, "limit": limit, "lease": timedelta(seconds=lease)}
    with conn.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(TAKE, values).fetchall()
    return [
        Taken(
            Asked(
                tenant=Tenant(tenant),
                operation=OperationId(operation),
                effect_key=EffectKey(effect_key),
                job_class=JobClass(job_class),
                kind=cast(Kind, kind),
                effect_attempt=None if effect_attempt is None else EffectAttempt(effect_attempt),
                begun_at=begun_at,
                asks=asks,
                deadline=deadline,
            ),
            taken_by,
            version,
            quiescent_ms / 1000,
        )
        for tenant, operation, effect_key, job_class, kind, effect_attempt, version, asks, begun_at, quiescent_ms in rows
    ]


def settle(
    conn: Connection[Any], taken: Taken, answer: Landed | DidNotHappen, *, decision_id: UUID, actor: str
) -> Resolved:
    """Reconciles the effect by this answer, in the caller's transaction.

    Raises NotQuiescent for a negative answer to a question that was asked too early, StaleEffectAttempt when another
    worker asks by now, NotUnknown and WrongVersion when the effect was settled meanwhile, NotArmed.
    """
    verdict: Verdict = "applied" if isinstance(answer, Landed) else "not_applied"
    values = taken.parameters() | {
        "version": taken.version,
        "verdict": verdict,
        "evidence_ref": answer.evidence_ref,
        "receipt": answer.receipt if isinstance(answer, Landed) else None,
        "decision_id": decision_id,
        "actor": actor,
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(SETTLE, values).fetchone()
    assert row is not None
    return cast(Resolved, row[0])


def defer(conn: Connection[Any], taken: Taken, answer: str, delay: float) -> bool:
    """Keeps the answer's code, and asks again ``delay`` seconds from now; False when another worker asks by now."""
    values = taken.parameters() | {"answer": answer, "delay": timedelta(seconds=delay)}
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(DEFER, values).fetchone()
    assert row is not None
    return cast(bool, row[0])


def _required(value: str, what: str) -> None:
    if type(value) is not str or not 1 <= len(value.strip()) or len(value) > REFERENCE_CHARS_MAX or "\0" in value:
        raise InvalidInput(f"{what} is not text of 1 to {REFERENCE_CHARS_MAX} characters", field=what)
