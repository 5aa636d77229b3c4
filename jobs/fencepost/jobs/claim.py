"""Claiming: due work under a finite lease, each claim with a new attempt and the next generation.

An attempt counts here, so a crash counts. Work with a pending or unknown effect is never claimed. Each claim also
takes back what expired leases left behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, LiteralString, TypeVar, cast
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row
from pydantic import BaseModel, ValidationError

from fencepost.jobs.fence import Fence
from fencepost.schemas import content
from fencepost.schemas.errors import InvalidArgs, InvalidInput, Undecodable
from fencepost.schemas.event import Event
from fencepost.schemas.identity import JobClass, OperationId, Tenant, as_class, as_text

__all__ = [
    "CLAIM",
    "DEFAULT_QUEUE",
    "MARKS",
    "REGISTER",
    "Job",
    "JobClassPolicy",
    "Mode",
    "Policy",
    "claim",
    "marks",
    "register_class",
]

Policy = Literal["strict", "resumable"]
Mode = Literal["execute", "finish"]
M = TypeVar("M", bound=BaseModel)

DEFAULT_QUEUE = "default"
LIMIT_MAX = 1000

REGISTER: LiteralString = """
SELECT fencepost.register_class(%(class)s, %(policy)s, %(lease)s, %(max_attempts)s, %(max_finishes)s,
                                %(backoff_base)s, %(backoff_max)s, %(max_effect_timeout)s, %(network_bound)s,
                                %(queue)s, %(limit)s, %(tenant_limit)s, %(fair)s)"""
CLAIM: LiteralString = """
SELECT tenant, operation, class, generation, attempt, owner, epoch, mode, attempts, max_attempts, args, source_event,
       lease_ms
FROM fencepost.claim(%(owner)s, %(classes)s, %(limit)s, %(marks)s::jsonb)"""
MARKS: LiteralString = "SELECT fencepost.marks(%(classes)s, %(marks)s::jsonb)::text"


@dataclass(frozen=True, slots=True)
class JobClassPolicy:
    """What the database holds every job of a class to; durations in seconds.

    ``strict``: one effect, and once it succeeded the job may only finish with its receipt. ``resumable``: several
    effects, each remembered by its receipt. Attempts used up make poison; claims in mode finish have ``max_finishes``
    of their own. Retries wait ``backoff_base`` doubled per attempt up to ``backoff_max``. No effect may take longer
    than ``max_effect_timeout``; ``network_bound`` later nothing of a call can still be under way.

    ``queue``: what is paused, and what workers serve, together. ``limit``: how many jobs of the class may run at a time,
    whoever claims them; ``tenant_limit``: how many of them of one tenant. ``fair``: tenants with due jobs are served in
    turn; so they are with ``tenant_limit``, which comes with a ``limit`` of 1,000 where none is given. Raises InvalidInput.
    """

    name: JobClass
    lease: float = 30.0
    max_attempts: int = 5
    policy: Policy = "strict"
    max_finishes: int = 20
    backoff_base: float = 1.0
    backoff_max: float = 300.0
    max_effect_timeout: float = 30.0
    network_bound: float = 30.0
    queue: str = DEFAULT_QUEUE
    limit: int | None = None
    tenant_limit: int | None = None
    fair: bool = False

    def __post_init__(self) -> None:
        as_text(self.queue, "queue")
        for name, most in (("limit", self.limit), ("tenant_limit", self.tenant_limit)):
            if most is not None and (type(most) is not int or not 1 <= most <= LIMIT_MAX):
                raise InvalidInput(
                    f"{name} is not a whole number from 1 to {LIMIT_MAX}", field=name, hint="leave it out for no limit"
                )


@dataclass(frozen=True, slots=True)
class Job:
    """One claim. ``mode`` finish: publish with the recorded receipt, begin nothing.

    ``deadline`` is when the lease is over at the latest, by this process's monotonic clock counted from before the
    claim's round trip: it may only make this worker stop earlier, never later.
    """

    fence: Fence
    mode: Mode
    attempts: int
    max_attempts: int
    args: bytes = field(repr=False)
    source_event: UUID | None
    lease: float
    deadline: float

    @property
    def tenant(self) -> Tenant:
        """Whose job it is."""
        return self.fence.tenant

    @property
    def operation(self) -> OperationId:
        """The business identity of the request."""
        return self.fence.operation

    @property
    def job_class(self) -> JobClass:
        """The kind of job."""
        return self.fence.job_class

    def json(self) -> content.JsonObject:
        """The args as they were submitted, private member included."""
        return content.decode(self.args)

    def parse(self, model: type[M]) -> M:
        """The args as a model or an event, or InvalidArgs naming the first field that does not fit, never its value."""
        try:
            if issubclass(model, Event):
                return model.parse(_Accepted(self, model))
            return model.model_validate_json(self.args)
        except Undecodable as error:
            where = error.field or "content"
        except ValidationError as error:
            where = content.shown_path(error.errors(include_input=False)[0]["loc"])
        raise InvalidArgs(f"args do not fit {model.__name__} at {where}", field=f"args.{where}") from None


class _Accepted:
    """The event whose content a job carries, as far as it is known to it."""

    def __init__(self, job: Job, model: type[Event]) -> None:
        self.id = job.source_event or UUID(int=0)
        self.type = model.event_type
        self.version = model.event_version
        self.tenant = str(job.tenant)
        self.operation = self.ordering_key = str(job.operation)
        self.payload = job.args


def register_class(conn: Connection[Any], policy: JobClassPolicy) -> None:
    """Registers a class or changes its policy, in the caller's transaction; a process calls it before it claims."""
    conn.execute(
        REGISTER,
        {
            "class": as_class(policy.name),
            "policy": policy.policy,
            "lease": timedelta(seconds=policy.lease),
            "max_attempts": policy.max_attempts,
            "max_finishes": policy.max_finishes,
            "backoff_base": timedelta(seconds=policy.backoff_base),
            "backoff_max": timedelta(seconds=policy.backoff_max),
            "max_effect_timeout": timedelta(seconds=policy.max_effect_timeout),
            "network_bound": timedelta(seconds=policy.network_bound),
            "queue": policy.queue,
            "limit": policy.limit,
            "tenant_limit": policy.tenant_limit,
            "fair": policy.fair,
        },
    )


def claim(conn: Connection[Any], owner: str, classes: Sequence[str], limit: int, hint: str | None = None) -> list[Job]:
    """Up to ``limit`` due jobs of these classes under new leases, in the caller's transaction: they count once it commits.

    Of a class that is paused, at its limit, or fair or limited and being claimed by somebody else at this moment, none.

    ``hint`` is what ``marks`` returned: with it a claim walks over nothing that is used up, whatever snapshots are held.

    Crash here: [C] after this commit and before the handler: the lease expires and the next claim takes the job back.
    Raises UnknownClass before ``register_class``, NotArmed, InvalidInput for an owner that cannot be stored.
    """
    started = time.monotonic()
    values = {"owner": owner, "classes": list(classes), "limit": limit, "marks": hint}
    with conn.cursor(row_factory=tuple_row, binary=True) as cursor:
        rows = cursor.execute(CLAIM, values).fetchall()
    return [_job(row, started) for row in rows]


def marks(conn: Connection[Any], classes: Sequence[str], hint: str | None = None) -> str | None:
    """A hint for the next claims of these classes, made from the last one; never changes what may be claimed.

    Call it on an autocommit connection after claims that took something; start anew without a hint every minute or so.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(MARKS, {"classes": list(classes), "marks": hint}).fetchone()
    assert row is not None
    return cast("str | None", row[0])


def _job(row: tuple[Any, ...], started: float) -> Job:
    tenant, operation, job_class, generation, attempt, owner, epoch, mode, attempts, most, args, event, lease_ms = row
    # What PostgreSQL gave is what it holds: nothing is converted, for this runs for every claim.
    lease = lease_ms / 1000
    fence = Fence(tenant, operation, job_class, generation, attempt, owner, epoch)
    return Job(fence, mode, attempts, most, args, event, lease, started + lease)
