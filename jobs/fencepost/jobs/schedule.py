"""Schedules: which instants a periodic job is due at, and their place in the database; one job for each instant.

The operation of a job is its schedule's name and the instant, so that submitting it again is the same job, whoever does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, LiteralString, Protocol, cast, get_args

from psycopg import Connection
from psycopg.rows import tuple_row
from pydantic import BaseModel

from fencepost.schemas.errors import ConfigError, InvalidInput
from fencepost.schemas.identity import JobClass, OperationId, Tenant, as_name, as_tenant

__all__ = [
    "Arguments",
    "Every",
    "Missed",
    "Schedule",
    "Taken",
    "Timetable",
    "advance",
    "define",
    "register",
    "remove",
    "see",
    "take",
    "until_next",
]

Missed = Literal["skip", "last", "all"]
Arguments = Mapping[str, object] | BaseModel

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVERY_SECONDS_MAX = 366 * 86_400
# Of what was missed, this many instants at most are submitted late: the newest.
LATE_MAX = 1000
SPAN = timedelta(hours=1)

REGISTER: LiteralString = """
SELECT fencepost.register_schedule(%(schedule)s, %(class)s, %(tenant)s, %(timetable)s, %(missed)s, %(worker)s, %(starting)s)"""
TAKE: LiteralString = """
SELECT schedule, "position", now, restored FROM fencepost.take_schedule(%(schedules)s, %(versions)s, %(worker)s)"""
ADVANCE: LiteralString = """
SELECT fencepost.advance_schedule(%(schedule)s, %(position)s, %(next_at)s, %(last_at)s, %(submitted)s, %(missed)s)"""
SEE: LiteralString = "SELECT fencepost.see_schedules(%(schedules)s, %(versions)s, %(worker)s)"
REMOVE: LiteralString = "SELECT fencepost.remove_schedule(%(schedule)s, %(actor)s, %(reason)s)"
NEXT: LiteralString = """
SELECT extract(epoch FROM min(coalesce(s.next_at, s.position)) - clock_timestamp())::float FROM fencepost.schedule AS s
JOIN unnest(%(schedules)s::text[], %(versions)s::integer[]) AS u (schedule, version)
  ON s.schedule = u.schedule AND s.version = u.version"""


class Timetable(Protocol):
    """What knows its instants; its text tells one from another."""

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Every instant (UTC, whole seconds) after this one, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Every so many whole seconds, counted from 1970 by UTC: the same instants whenever and wherever one starts."""

    seconds: int

    def __post_init__(self) -> None:
        if type(self.seconds) is not int or not 1 <= self.seconds <= EVERY_SECONDS_MAX:
            raise InvalidInput("every is not a whole number of seconds from 1 to a year", field="every")

    def __str__(self) -> str:
        return f"every {self.seconds} s"

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Every instant after this one."""
        step = timedelta(seconds=self.seconds)
        found = EPOCH + (instant - EPOCH) // step * step
        while True:
            found += step
            yield found


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job of this class for each instant of the timetable; ``args`` makes what it carries from the instant.

    What is due and was not submitted in time, because nobody ran, is missed: ``last`` submits the latest instant only,
    however late; ``all`` each of them, the newest 1000 at most; ``skip`` none that is more than ``grace`` seconds late.
    """

    name: str
    job_class: JobClass
    tenant: Tenant
    timetable: Timetable
    args: Callable[[datetime], Arguments]
    missed: Missed = "last"
    grace: float = 60.0

    def __post_init__(self) -> None:
        if self.missed not in get_args(Missed):
            raise InvalidInput("missed is not skip, last or all", field="missed")

    def operation(self, at: datetime) -> OperationId:
        """The operation of the job of this instant."""
        return OperationId(f"{self.name}@{at:%Y-%m-%dT%H:%M:%SZ}")

    def due(self, position: datetime, now: datetime) -> tuple[list[datetime], int]:
        """Which instants after the position, up to now, are to be submitted, and how many others were missed."""
        found = self._passed(position, now)
        match self.missed:
            case "last":
                chosen = found[-1:]
            case "all":
                chosen = found[-LATE_MAX:]
            case "skip":
                chosen = [at for at in found if (now - at).total_seconds() <= self.grace]
        return chosen, len(found) - len(chosen)

    def _passed(self, position: datetime, now: datetime) -> list[datetime]:
        # Of a long time only its end is looked at: no more than what is submitted, and some that are counted.
        span = SPAN
        while True:
            start = max(position, now - span)
            found: list[datetime] = []
            for at in self.timetable.after(start):
                if at > now:
                    break
                found.append(at)
            if start == position or len(found) > LATE_MAX:
                return found
            span *= 8


def define(
    name: str,
    job_class: JobClass,
    *,
    tenant: str,
    cron: str | None,
    every: timedelta | int | None,
    time_zone: str | None,
    args: Arguments | Callable[[datetime], Arguments] | None,
    missed: Missed,
    grace: float,
) -> Schedule:
    """The schedule that these words describe; InvalidInput or ConfigError naming the one that does not fit."""

    def made(at: datetime) -> Arguments:
        if args is None:
            return {"schedule": name, "at": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
        return args(at) if callable(args) else args

    return Schedule(
        as_name(name, "schedule"), job_class, as_tenant(tenant), _timetable(cron, every, time_zone), made, missed, grace
    )


def _timetable(cron: str | None, every: timedelta | int | None, time_zone: str | None) -> Timetable:
    if (cron is None) == (every is None):
        raise ConfigError("a schedule has either cron or every", field="cron", hint='cron="0 3 * * *", or every=600')
    if cron is not None:
        try:
            from fencepost.jobs.cron import Cron
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cron needs {error.name}", field="cron", hint="pip install 'fencepost[periodic]'"
            ) from None
        return Cron(cron, time_zone or "UTC")
    if time_zone is not None:
        raise ConfigError("an interval has no time zone", field="time_zone", hint="it is counted from 1970 by UTC")
    assert every is not None
    if isinstance(every, timedelta):
        seconds, part = divmod(every, timedelta(seconds=1))
        return Every(0 if part else seconds)
    return Every(every)


@dataclass(frozen=True, slots=True)
class Taken:
    """A schedule that nobody else has until the transaction ends: done up to its position, and what time it is there."""

    schedule: str
    position: datetime
    now: datetime
    restored: bool


def register(conn: Connection[Any], schedule: Schedule, worker: str, *, starting: bool) -> int | None:
    """The version under which this definition is current, in the caller's transaction; None when another one is.

    With ``starting`` it becomes current whatever was before. Otherwise it takes over only where nobody of the current
    definition was seen for two minutes, and a schedule that an operator removed stays removed.
    """
    return cast(
        "int | None",
        _one(
            conn,
            REGISTER,
            {
                "schedule": schedule.name,
                "class": schedule.job_class,
                "tenant": schedule.tenant,
                "timetable": str(schedule.timetable),
                "missed": schedule.missed,
                "worker": worker,
                "starting": starting,
            },
        ),
    )


def take(conn: Connection[Any], versions: Mapping[str, int], worker: str) -> Taken | None:
    """One of these schedules that is due, for the length of the caller's transaction. Raises NotArmed."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(TAKE, _which(versions) | {"worker": worker}).fetchone()
    return None if row is None else Taken(row[0], row[1].astimezone(UTC), row[2].astimezone(UTC), row[3])


def advance(
    conn: Connection[Any],
    name: str,
    position: datetime,
    next_at: datetime | None,
    *,
    submitted: list[datetime],
    missed: int,
) -> None:
    """Every instant up to the position is dealt with once the caller's transaction, which took the schedule, commits."""
    conn.execute(
        ADVANCE,
        {
            "schedule": name,
            "position": position,
            "next_at": next_at,
            "last_at": submitted[-1] if submitted else None,
            "submitted": len(submitted),
            "missed": missed,
        },
    )


def see(conn: Connection[Any], versions: Mapping[str, int], worker: str) -> None:
    """Notes that somebody runs these."""
    conn.execute(SEE, _which(versions) | {"worker": worker})


def remove(conn: Connection[Any], name: str, *, actor: str, reason: str) -> None:
    """Forgets a schedule, in the caller's transaction; who and why is recorded. InvalidInput while a worker has it."""
    conn.execute(REMOVE, {"schedule": name, "actor": actor, "reason": reason})


def until_next(conn: Connection[Any], versions: Mapping[str, int]) -> float | None:
    """Seconds until the first of them is due, negative when one is; None when there is none."""
    return cast("float | None", _one(conn, NEXT, _which(versions)))


def _which(versions: Mapping[str, int]) -> dict[str, object]:
    return {"schedules": list(versions), "versions": list(versions.values())}


def _one(conn: Connection[Any], statement: LiteralString, values: Mapping[str, object]) -> object:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return row[0]
