"""Queues: classes that are paused together, and what one worker takes of each at a time.

Limits of a class hold in the whole database and belong to its policy (`claim`); a worker's own hold in its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, LiteralString, cast

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.schemas.errors import ConfigError, InvalidInput

__all__ = ["CONCURRENCY_MAX", "PAUSE", "RESUME", "Paused", "Resumed", "Share", "pause", "resume", "shares"]

Paused = Literal["paused", "already_paused"]
Resumed = Literal["resumed", "not_paused"]

CONCURRENCY = 4
CONCURRENCY_MAX = 256
PAUSE: LiteralString = "SELECT fencepost.pause(%(scope)s, %(name)s, %(actor)s, %(reason)s)"
RESUME: LiteralString = "SELECT fencepost.resume(%(scope)s, %(name)s, %(actor)s, %(reason)s)"


@dataclass(frozen=True, slots=True)
class Share:
    """Classes that a worker claims together, and how many of their jobs it runs at a time at most."""

    classes: tuple[str, ...]
    most: int
    alone: bool = True
    """There is no other share."""

    @property
    def half(self) -> int:
        """Half of what may run at a time, one at least."""
        return (self.most + 1) // 2


def shares(classes: Mapping[str, str], concurrency: int | None, queues: Mapping[str, int] | None) -> tuple[Share, ...]:
    """What a worker claims: its classes (with their queues) together, or queue by queue, where ``queues`` names them.

    Raises ConfigError: ``classes`` (none), ``queues`` (none of the classes is in one, or what may run in it is not a
    number from 1 on), ``concurrency`` (given beside ``queues``, or not between 1 and 256 in all).
    """
    if not classes:
        raise ConfigError("the worker has no class", field="classes", hint="decorate a handler with @worker.job(...)")
    made: tuple[Share, ...]
    if queues is None:
        made = (Share(tuple(classes), CONCURRENCY if concurrency is None else concurrency),)
    elif concurrency is not None:
        raise ConfigError(
            "concurrency and queues are both given", field="concurrency", hint="leave it out: it is the sum of queues"
        )
    else:
        made = tuple(_share(classes, queue, most, alone=len(queues) == 1) for queue, most in queues.items())
    if not 1 <= sum(share.most for share in made) <= CONCURRENCY_MAX:
        raise ConfigError(f"concurrency is not between 1 and {CONCURRENCY_MAX}", field="concurrency")
    return made


def _share(classes: Mapping[str, str], queue: str, most: int, *, alone: bool) -> Share:
    named = tuple(name for name, its in classes.items() if its == queue)
    if not named:
        known = ", ".join(sorted(set(classes.values())))
        raise ConfigError(f"no class of this worker is in queue {queue}", field="queues", hint=f"it has: {known}")
    if most < 1:
        raise ConfigError(f"less than one job of queue {queue} may run", field="queues", hint="leave the queue out")
    return Share(named, most, alone)


def pause(
    conn: Connection[Any], *, queue: str | None = None, job_class: str | None = None, actor: str, reason: str
) -> Paused:
    """After the caller's commit nothing of this queue or class starts until it is resumed; what runs goes on and publishes.

    Waits for the claims that are under way, at most five seconds (psycopg.errors.LockNotAvailable). Who and why is
    recorded. Raises UnknownClass, InvalidInput: ``queue`` (no registered class is in it), ``scope`` (not one of the two).
    """
    return cast(Paused, _decide(conn, PAUSE, queue, job_class, actor, reason))


def resume(
    conn: Connection[Any], *, queue: str | None = None, job_class: str | None = None, actor: str, reason: str
) -> Resumed:
    """After the caller's commit this queue or class is claimed again, unless the other of the two is paused as well.

    Who and why is recorded. Raises InvalidInput: ``scope`` (not one of the two).
    """
    return cast(Resumed, _decide(conn, RESUME, queue, job_class, actor, reason))


def _decide(
    conn: Connection[Any], statement: LiteralString, queue: str | None, job_class: str | None, actor: str, reason: str
) -> object:
    if (queue is None) == (job_class is None):
        raise InvalidInput("neither or both of queue and class are given", field="scope", hint="name one of them")
    scope, name = ("class", job_class) if queue is None else ("queue", queue)
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, {"scope": scope, "name": name, "actor": actor, "reason": reason}).fetchone()
    assert row is not None
    return row[0]
