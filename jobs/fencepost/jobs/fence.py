"""The fence: every comparison that a worker must win, made by PostgreSQL under the job's row lock.

Locks: gate (shared), job, effect, domain rows, in this order. Take the fence before any domain write and outside
savepoints: rolling back to an earlier savepoint would release the row lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection

from fencepost.schemas.identity import Attempt, Epoch, Generation, JobClass, OperationId, Owner, Tenant

__all__ = ["COMPLETE", "FENCE", "Fence", "complete", "fence"]

FENCE: LiteralString = """
SELECT fencepost.fence(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""
COMPLETE: LiteralString = """
SELECT fencepost.complete(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""


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
