"""Signals: what somebody tells a job, in the same commit as whatever else that transaction does, or not at all.

A signal is kept whether the job waits for it, is running, or will wait for it later.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, LiteralString, cast, overload

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.stage import dump, load
from fencepost.schemas.identity import as_class, as_operation, as_tenant, as_text
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async, is_async

__all__ = ["PAYLOAD_BYTES_MAX", "SIGNAL", "SIGNALS", "Heard", "Signal", "signal", "signals"]

PAYLOAD_BYTES_MAX = 64 * 1024
SIGNAL: LiteralString = """
SELECT fencepost.signal(%(tenant)s, %(operation)s, %(class)s, %(name)s, %(payload)s, %(key)s, %(actor)s)"""
SIGNALS: LiteralString = """
SELECT n, name, key, payload, actor, login, at FROM fencepost.signals(%(tenant)s, %(operation)s, %(class)s)"""

Heard = Literal["recorded", "known", "too_late"]


@dataclass(frozen=True, slots=True)
class Signal:
    """What a job was told: by whom (as they said, and by which login), and when the database took it."""

    number: int
    name: str
    key: str | None
    payload: Any = field(repr=False)
    actor: str | None
    login: str
    at: datetime


@overload
def signal(
    tx: Transaction,
    *,
    tenant: str,
    operation: str,
    job_class: str,
    name: str,
    payload: object = None,
    key: str | None = None,
    actor: str | None = None,
) -> Heard: ...
@overload
def signal(
    tx: AsyncTransaction,
    *,
    tenant: str,
    operation: str,
    job_class: str,
    name: str,
    payload: object = None,
    key: str | None = None,
    actor: str | None = None,
) -> Awaitable[Heard]: ...
def signal(
    tx: Transaction | AsyncTransaction,
    *,
    tenant: str,
    operation: str,
    job_class: str,
    name: str,
    payload: object = None,
    key: str | None = None,
    actor: str | None = None,
) -> Heard | Awaitable[Heard]:
    """Tells the job in the caller's transaction, before or after it waits: no signal is lost, and no lock of the job taken.

    ``tx`` as for ``submit``. ``payload`` is JSON of at most 64 KiB. With ``key`` it can be repeated: ``known`` when this
    key told the job the same before. ``too_late``: the job is done, nothing is kept. A cancelled or poison job keeps it, in
    case an operator queues it again. ``actor`` is kept beside the login. A job takes a thousand signals.

    Raises UnknownJob (submitting in the same transaction is enough), OperationConflict for another name or payload under
    a key, WrongTransaction as ``submit`` does, InvalidInput.
    """
    parameters: dict[str, object] = {
        "tenant": as_tenant(tenant),
        "operation": as_operation(operation),
        "class": as_class(job_class),
        "name": as_text(name, "name"),
        "payload": dump(payload, "payload", most=PAYLOAD_BYTES_MAX),
        "key": None if key is None else as_text(key, "key"),
        "actor": None if actor is None else as_text(actor, "actor"),
    }
    if is_async(tx):
        return _signal_async(cast(AsyncTransaction, tx), parameters)
    with connection_of(cast(Transaction, tx)).cursor(row_factory=tuple_row) as cursor:
        return _heard(cursor.execute(SIGNAL, parameters).fetchone())


async def _signal_async(tx: AsyncTransaction, parameters: dict[str, object]) -> Heard:
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(SIGNAL, parameters)
        return _heard(await cursor.fetchone())


def _heard(row: tuple[Any, ...] | None) -> Heard:
    assert row is not None
    return cast(Heard, row[0])


def signals(conn: Connection[Any], f: Fence) -> list[Signal]:
    """Everything that this job was told and that is committed, in the order in which it was written."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(SIGNALS, f.parameters()).fetchall()
    return [
        Signal(number=n, name=name, key=key, payload=load(bytes(payload)), actor=actor, login=login, at=at)
        for n, name, key, payload, actor, login, at in rows
    ]
