"""The fence: every comparison that a worker must win, made by PostgreSQL under the job's row lock.

Locks: gate (shared), job, effect, domain rows, in this order. Take the fence before any domain write and outside
savepoints: rolling back to an earlier savepoint would release the row lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.schemas.errors import EffectOpen, StaleFence
from fencepost.schemas.identity import Attempt, Epoch, Generation, JobClass, OperationId, Owner, Tenant

__all__ = ["COMPLETE", "COMPLETE_MANY", "FENCE", "Fence", "complete", "complete_many", "fence"]

FENCE: LiteralString = """
SELECT fencepost.fence(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""
COMPLETE: LiteralString = """
SELECT fencepost.complete(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""

# No identity holds a control character, so one joins them: arrays of a hundred members each would cost more than the call.
COMPLETE_MANY: LiteralString = """
SELECT item, code, field FROM fencepost.complete_many(
    string_to_array(%(tenants)s, chr(31)), string_to_array(%(operations)s, chr(31)), string_to_array(%(classes)s, chr(31)),
    %(generations)s::bigint[], %(attempts)s::uuid[], string_to_array(%(owners)s, chr(31)), %(epochs)s::bigint[])"""
JOINT = "\x1f"
OPEN = "ZF030"


@dataclass(frozen=True, slots=True)
class Fence:
    """Who may act on a job now: valid exactly while PostgreSQL finds every part equal and the lease unexpired.

    Owners' names are reused, so the owner alone proves nothing; attempt and generation do.
    """

    tenant: Tenant
    operation: OperationId
    job_class: JobClass
    generation: Generation
    attempt: Attempt
    owner: Owner
    epoch: Epoch

    def parameters(self) -> dict[str, object]:
        """The seven parts as parameters of the database functions."""
        return {
            "tenant": self.tenant,
            "operation": self.operation,
            "class": self.job_class,
            "generation": self.generation,
            "attempt": self.attempt,
            "owner": self.owner,
            "epoch": self.epoch,
        }


def fence(conn: Connection[Any], f: Fence) -> None:
    """Fences the caller's transaction: until it ends nobody supersedes this attempt, and its commit is checked again.

    Raises StaleFence naming the first part that differs, EffectOpen while an effect is pending or unknown, NotArmed.
    A commit after the lease ended, or after the fence was lost in the same transaction, is refused with StaleFence.
    """
    conn.execute(FENCE, f.parameters())


def complete(conn: Connection[Any], f: Fence) -> None:
    """Checks the fence and completes the job in the caller's transaction; done only when that commits.

    Raises as ``fence`` does.
    """
    conn.execute(COMPLETE, f.parameters())


def complete_many(conn: Connection[Any], fences: Sequence[Fence]) -> dict[int, StaleFence | EffectOpen]:
    """Completes up to 1000 jobs in the caller's transaction, each under its own fence: a stale one is refused alone.

    Returns the refused ones by their index, with what ``complete`` would have raised; the others are done once the
    caller commits. Raises NotArmed, then nothing is done.
    """
    if not fences:
        return {}
    values = {
        "tenants": JOINT.join([f.tenant for f in fences]),
        "operations": JOINT.join([f.operation for f in fences]),
        "classes": JOINT.join([f.job_class for f in fences]),
        "generations": f"{{{','.join([str(f.generation) for f in fences])}}}",
        "attempts": f"{{{','.join([f.attempt.hex for f in fences])}}}",
        "owners": JOINT.join([f.owner for f in fences]),
        "epochs": f"{{{','.join([str(f.epoch) for f in fences])}}}",
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        refused = cursor.execute(COMPLETE_MANY, values).fetchall()
    return {item - 1: _refusal(code, field) for item, code, field in refused}


def _refusal(code: str, field: str) -> StaleFence | EffectOpen:
    if code == OPEN:
        return EffectOpen(
            "an effect of this job is pending or unknown", field=field, hint="record or reconcile it first"
        )
    return StaleFence(
        f"the fence is no longer current: {field}",
        field=field,
        hint="stop this attempt; what it computed may be staged for its successor, not published",
    )
