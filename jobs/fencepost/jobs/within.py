"""Acting under authority without a job: a web handler, a script, an administrator's page.

Locks: gate (shared), before any domain row. Call it outside savepoints: rolling back to an earlier one gives the lock back.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, LiteralString, cast, overload

from psycopg.rows import tuple_row

from fencepost.schemas.identity import Epoch, as_class, as_tenant, as_text
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async, is_async

__all__ = ["WITHIN", "within"]

WITHIN: LiteralString = "SELECT fencepost.within(%(principal)s, %(tenant)s, %(class)s)"


@overload
def within(tx: Transaction, principal: str, tenant: str, job_class: str | None = None) -> Epoch: ...
@overload
def within(tx: AsyncTransaction, principal: str, tenant: str, job_class: str | None = None) -> Awaitable[Epoch]: ...
def within(
    tx: Transaction | AsyncTransaction, principal: str, tenant: str, job_class: str | None = None
) -> Epoch | Awaitable[Epoch]:
    """The caller's transaction commits while the principal's authority stands, or not at all; returns the tenant's epoch.

    ``tx`` as for ``submit``: it is neither begun, ended nor written to. From the call to the end of the transaction every
    change of authority (rotation, restriction, revocation, recovery) waits for it, at most five seconds: keep it short,
    and call no provider inside. Without ``job_class`` the act is of no class in particular, and needs a grant for all of
    them. A freeze is about effects and does not refuse it.

    Raises NotArmed; Restricted, whose field is ``principal`` (revoked, not registered, or of another login), ``tenant``,
    ``class`` or ``grant``; StaleFence (``epoch``) where the tenant got a new epoch after the grant; WrongTransaction as
    ``submit`` does; InvalidInput. At isolation levels above READ COMMITTED it raises psycopg's SerializationFailure where
    authority changed since the transaction's snapshot was taken, and locks one row of ours.
    """
    parameters: dict[str, object] = {
        "principal": as_text(principal, "principal"),
        "tenant": as_tenant(tenant),
        "class": None if job_class is None else as_class(job_class),
    }
    if is_async(tx):
        return _within_async(cast(AsyncTransaction, tx), parameters)
    with connection_of(cast(Transaction, tx)).cursor(row_factory=tuple_row) as cursor:
        return _epoch(cursor.execute(WITHIN, parameters).fetchone())


async def _within_async(tx: AsyncTransaction, parameters: dict[str, object]) -> Epoch:
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(WITHIN, parameters)
        return _epoch(await cursor.fetchone())


def _epoch(row: tuple[Any, ...] | None) -> Epoch:
    assert row is not None
    return Epoch(row[0])
