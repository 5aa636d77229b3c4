"""Nothing is handled in a database that is not armed: after a restore what it lost comes first, and in its order.

A plain restart is over once a relay, a worker or `fencepost authority guard` has armed it again; a restore once an operator
has called `fencepost authority recover`. A database that does not answer is none that is disarmed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, LiteralString, NamedTuple

from fencepost.consumer.dead_letters import describe
from fencepost.consumer.runner import RunnerOptions
from fencepost.schemas.errors import FencepostError, NotArmed

__all__ = ["POINT", "READ_SECONDS", "Fetch", "Point", "not_armed", "reason", "when_armed"]

POINT: LiteralString = """
SELECT fencepost.armed(), i.id::text, i.recovered_epoch FROM fencepost.installation AS i"""

READ_SECONDS = 10.0
LOOK_SECONDS = 0.01
# A restart is over within seconds, and a recovery is waited for by somebody.
PAUSE_SECONDS_MAX = 5.0

log = logging.getLogger("fencepost.consumer")

Fetch = Callable[[LiteralString, Mapping[str, object]], Future[list[tuple[Any, ...]]]]


class Point(NamedTuple):
    """What a database says of itself; ``recovered`` is the epoch of its last recovery."""

    armed: bool
    installation: str
    recovered: int


def not_armed() -> NotArmed:
    """Why nothing is handled."""
    return NotArmed(
        "this database is not armed",
        field="armed",
        hint="after a plain restart a relay, a worker or `fencepost authority guard` arms it again; "
        "after a restore an operator must decide: fencepost doctor",
    )


def reason(error: BaseException) -> str:
    """A refusal of ours with its field and what to do; of anything else what may be told of it."""
    return f"{type(error).__name__}: {error}" if isinstance(error, FencepostError) else describe(error)


def when_armed(
    consumer: str, fetch: Fetch, options: RunnerOptions, stop: threading.Event, moved: Callable[[], None]
) -> Point | None:
    """What the database says of itself, once it is armed; None once stopped.

    ``moved`` is called while it waits. Invariant: never waits for the event, whose lock this thread would hold when a
    signal's handler sets it.
    """

    def waits(until: float, over: Callable[[], bool] = lambda: False) -> None:
        while not over() and not stop.is_set() and time.monotonic() < until:
            moved()
            time.sleep(LOOK_SECONDS)

    tries = 0
    while not stop.is_set():
        asked = fetch(POINT, {})
        waits(time.monotonic() + READ_SECONDS, asked.done)
        error: BaseException | None = TimeoutError()
        if asked.done() and (error := asked.exception()) is None:
            point = Point(*asked.result()[0])
            if point.armed:
                return point
            error = not_armed()
        if stop.is_set():
            break
        tries += 1
        log.warning("%s: nothing is handled for now: %s", consumer, reason(error or TimeoutError()))
        waits(time.monotonic() + min(PAUSE_SECONDS_MAX, options.backoff(tries)))
    return None
