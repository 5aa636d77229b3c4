"""Scheduling many jobs of one class in the caller's transaction: all that are refused refuse the call, the rest is as `submit`."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString, cast, overload
from uuid import UUID

from psycopg.rows import tuple_row
from pydantic import BaseModel

from fencepost.jobs.submit import arguments, as_instant, as_priority
from fencepost.schemas import content
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_class, as_operation, as_tenant
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async, is_async

__all__ = ["SUBMIT_MANY", "Submission", "submit_many"]

BATCH_JOBS = 1000
BATCH_BYTES = 4 * 1024 * 1024
SUBMIT_MANY: LiteralString = """
SELECT fencepost.submit_many(%(class)s, %(tenants)s::text[], %(operations)s::text[], %(args)s::bytea[], %(bindings)s::text[],
                             %(source_events)s::uuid[], %(run_at)s::timestamptz[], %(priorities)s::integer[])"""


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a bulk; see ``submit`` for its parts."""

    tenant: str
    operation: str
    args: Mapping[str, object] | BaseModel = field(repr=False)
    run_at: datetime | None = None
    priority: int = 0
    source_event: UUID | None = None


@overload
def submit_many(tx: Transaction, job_class: str, jobs: Iterable[Submission]) -> list[bool]: ...
@overload
def submit_many(tx: AsyncTransaction, job_class: str, jobs: Iterable[Submission]) -> Awaitable[list[bool]]: ...
def submit_many(
    tx: Transaction | AsyncTransaction, job_class: str, jobs: Iterable[Submission]
) -> list[bool] | Awaitable[list[bool]]:
    """Schedules all of them in the caller's transaction; for each whether it is new, as ``submit`` tells.

    The iterable may be long: batches of at most 1,000 jobs and about 4 MiB of args go out one after the other, and no
    more than one is held. A bulk is faster when it comes in the order of tenants and operations.

    Raises as ``submit`` does; field and message name the job by its number in the iterable, from 1. What went before it is
    written: roll back, or use a savepoint.
    """
    name = as_class(job_class)
    if is_async(tx):
        return _submit_async(cast(AsyncTransaction, tx), name, jobs)
    new: list[bool] = []
    with connection_of(cast(Transaction, tx)).cursor(row_factory=tuple_row) as cursor:
        for batch in _batches(name, jobs):
            new += _new(cursor.execute(SUBMIT_MANY, batch).fetchone())
    return new


async def _submit_async(tx: AsyncTransaction, job_class: str, jobs: Iterable[Submission]) -> list[bool]:
    new: list[bool] = []
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        for batch in _batches(job_class, jobs):
            await cursor.execute(SUBMIT_MANY, batch)
            new += _new(await cursor.fetchone())
    return new


def _new(row: tuple[Any, ...] | None) -> list[bool]:
    assert row is not None
    return cast("list[bool]", row[0])


def _batches(job_class: str, jobs: Iterable[Submission]) -> Generator[dict[str, object]]:
    rows: list[tuple[object, ...]] = []
    size = 0
    for number, job in enumerate(jobs, 1):
        row, length = _row(number, job)
        if rows and (len(rows) == BATCH_JOBS or size + length > BATCH_BYTES):
            yield _parameters(job_class, rows)
            rows, size = [], 0
        rows.append(row)
        size += length
    if rows:
        yield _parameters(job_class, rows)


def _row(number: int, job: Submission) -> tuple[tuple[object, ...], int]:
    try:
        raw = arguments(job.args)
        return (
            as_tenant(job.tenant),
            as_operation(job.operation),
            raw,
            content.binding(raw),
            job.source_event,
            as_instant(job.run_at),
            as_priority(job.priority),
        ), len(raw)
    except InvalidInput as error:
        raise InvalidInput(f"job {number}: {error.message}", field=error.field, hint=error.hint) from None


def _parameters(job_class: str, rows: list[tuple[object, ...]]) -> dict[str, object]:
    names = ("tenants", "operations", "args", "bindings", "source_events", "run_at", "priorities")
    columns = (list(column) for column in zip(*rows, strict=True))
    return {"class": job_class, **dict(zip(names, columns, strict=True))}
