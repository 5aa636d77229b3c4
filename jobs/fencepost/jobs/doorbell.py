"""The doorbell: an idle worker sleeps until a job is due. A ring that is lost costs at most the longest poll.

Whoever makes a job due notifies only while a worker has marked itself asleep, for a NOTIFY in each transaction would cost
most of the commit rate. After the mark the worker looks once more, so that nothing commits unseen in between. A mark ends
by the database's clock: a worker that was killed in its sleep is soon not rung any more. Jobs due later ring nobody.

The worker listens on the connection over which it claims: one that died without a sign is noticed by the next poll.
"""

from __future__ import annotations

import threading
import time
from typing import Any, LiteralString
from uuid import uuid4

from psycopg import Connection

from fencepost.schemas.connect import ANSWER_SECONDS, connect
from fencepost.schemas.errors import ConfigError

__all__ = ["DOZE", "RUNG", "Doorbell", "prove"]

LISTEN: LiteralString = "LISTEN fencepost_jobs"
DOZE: LiteralString = "SELECT fencepost.doze_jobs(make_interval(secs => %(seconds)s))"
RUNG: LiteralString = "SELECT fencepost.rung_jobs(%(mark)s)"
PROOF: LiteralString = "SELECT pg_notify('fencepost_jobs', %(word)s)"

MARK_SECONDS = 10.0
MARGIN_SECONDS = 2.0
HEAR_SECONDS = 0.05
PROOF_SECONDS = 5.0


class Doorbell:
    """How a worker rests on its connection: first the mark, then another look, then sleep of at most ``longest`` seconds."""

    def __init__(self, conn: Connection[Any], longest: float) -> None:
        self._conn = conn
        self._longest = longest
        self._asleep_until = 0.0
        # Whether no writer was open at the mark, and whether nobody has slept since.
        self._quiet = self._fresh = False
        self._rung: int | None = None
        self._woken = False
        conn.execute(LISTEN)

    def awake(self) -> bool:
        """Called when there is no time to rest: takes the mark away if somebody rang for it. True when somebody did."""
        if self._rung is None and self._asleep_until > 0:
            self._rung = self._hear(0.0)
        if self._rung is None:
            return False
        self._conn.execute(RUNG, {"mark": self._rung})
        self._rung, self._asleep_until = None, 0.0
        return True

    def rest(self, pause: float, stopping: threading.Event, *, found: bool) -> bool:
        """Called when there is capacity; returns when it is time to look again, True after a sleep that nobody ended.

        The first call marks and returns at once, so that the caller looks once more; the next sleeps. While there is more
        work than rings (``found`` since the last call), after a ring that brought nothing, and while a writer is open that
        may not have seen the mark, it is for ``pause`` seconds only: so work comes in batches, and neither the jobs of
        other classes nor long transactions keep a worker busy.
        """
        woken, self._woken = self._woken, False
        rung = self.awake() or woken
        if (rung and not found) or (found and not woken):
            stopping.wait(pause)
            return False
        if time.monotonic() >= self._asleep_until or not (self._quiet or self._fresh):
            while self._hear(0.0) is not None:
                pass
            row = self._conn.execute(DOZE, {"seconds": MARK_SECONDS + self._longest}).fetchone()
            self._quiet = row is not None and row[0] is True
            self._asleep_until = time.monotonic() + MARK_SECONDS - MARGIN_SECONDS
            self._fresh = True
            return False
        self._fresh = False
        self._rung = self._hear(self._longest if self._quiet else pause, stopping)
        self._woken = self._rung is not None
        return self._quiet and not self._woken

    def _hear(self, seconds: float, stopping: threading.Event | None = None) -> int | None:
        """The mark of the first ring, or None after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            for note in self._conn.notifies(timeout=min(left, HEAR_SECONDS), stop_after=1):
                if note.payload.isascii() and note.payload.isdigit():
                    return int(note.payload)
            if left == 0 or (stopping is not None and stopping.is_set()):
                return None


def prove(conn: Connection[Any], dsn: str) -> None:
    """Rings from another connection, and raises ConfigError when this one, which listens, does not hear it."""
    word = f"proof {uuid4().hex}"
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as other:
        other.execute(PROOF, {"word": word})
    until = time.monotonic() + PROOF_SECONDS
    while True:
        # Read once more after the deadline: whoever was suspended meanwhile finds it in the socket.
        left = max(0.0, until - time.monotonic())
        if any(note.payload == word for note in conn.notifies(timeout=left, stop_after=1)):
            return
        if left == 0:
            break
    raise ConfigError(
        "no notification arrives, so the doorbell would never ring",
        field="doorbell",
        hint="connect to the server itself, not to a pooler in transaction mode, or leave the doorbell out",
    )
