"""Waiting: the attempt ends, uncharged and without a lease, until a signal arrives or a time comes.

    waits for            the first time                          when the handler comes here again
    a signal             sleeps unless it has arrived            the signal
    a signal, until      sleeps unless either has come           the same answer for ever: the signal, or that time was up
    until an instant     sleeps unless it has passed             goes on
    until a while away   sleeps, counted from now                sleeps again, counted from then

With a signal, a while is counted from the first wait for that signal.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any, Literal, LiteralString

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.signals import Signal, signals
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_text

__all__ = ["WAIT", "Answer", "Until", "wait"]

WAIT: LiteralString = """
SELECT fencepost.wait(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s,
                      %(signal)s, %(until)s, %(after)s)"""
SECONDS_MAX = 10 * 365.25 * 86_400.0

Until = datetime | timedelta | float
Answer = Signal | Literal["time", "waiting"]


def wait(conn: Connection[Any], f: Fence, *, signal: str | None = None, until: Until | None = None) -> Answer:
    """Ends the attempt unless what it waits for is there, in the caller's transaction; ``waiting`` when it ended.

    Else the attempt goes on, with the first signal of that name, or ``time`` when the time has come. Whichever a run was
    told about a signal, every later one is told too, until an operator requeues the job. ``until`` is an aware datetime,
    or a timedelta or seconds. Use an autocommit connection.

    Raises EffectOpen while an effect is pending or unknown, StaleFence, NotArmed, InvalidInput.
    """
    instant, after = _time(until)
    if signal is None and until is None:
        raise InvalidInput("nothing is waited for", field="signal", hint="give signal, until or both")
    parameters = f.parameters() | {
        "signal": None if signal is None else as_text(signal, "signal"),
        "until": instant,
        "after": after,
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(WAIT, parameters).fetchone()
    assert row is not None
    if not row[0]:
        return "waiting" if row[0] is None else "time"
    return next(s for s in signals(conn, f) if s.number == row[0])


def _time(until: Until | None) -> tuple[datetime | None, timedelta | None]:
    if until is None:
        return None, None
    if isinstance(until, datetime):
        if until.utcoffset() is None:
            raise InvalidInput("until is a time without a zone", field="until", hint="make it aware, e.g. tzinfo=UTC")
        return until, None
    seconds = until.total_seconds() if isinstance(until, timedelta) else float(until)
    if not math.isfinite(seconds) or not 0.001 <= seconds <= SECONDS_MAX:
        raise InvalidInput("until is not between a millisecond and ten years away", field="until")
    return None, timedelta(seconds=seconds)
