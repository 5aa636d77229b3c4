"""The doorbell: an idle relay sleeps until an event commits. A ring that is lost costs at most the longest poll.

Enqueueing transactions notify only while a relay has marked itself asleep, for a NOTIFY in each of them would cost most of
the commit rate. After the mark the relay looks once more, so that nothing commits unseen in between. A mark ends by the
database's clock: a relay that was killed in its sleep is soon not rung any more.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError

log = logging.getLogger("fencepost.relay")

LISTEN: LiteralString = "LISTEN fencepost"
DOZE: LiteralString = "SELECT fencepost.doze(make_interval(secs => %(seconds)s))"
THERE: LiteralString = "SELECT"
RUNG: LiteralString = "SELECT fencepost.rung(%(mark)s)"

DOZE_AFTER_SECONDS = 0.1
MARGIN_SECONDS = 1.0
HEAR_SECONDS = 0.5
AGAIN_SECONDS = 2.0
ASK_SECONDS = 5.0
LONGEST_SECONDS = 300.0
# While a writer is open that may not have seen the mark: pauses from the first to the longest.
WRITER_FIRST_SECONDS = 0.02
WRITER_LONGEST_SECONDS = 0.5


class Doorbell:
    """Hears every ring while its connection lasts, and is not `listening` otherwise; one for all loops of a relay.

    Its connection is a session of its own: it must lead to the server itself or a pooler in session mode. `answer`
    (seconds) bounds each statement.
    """

    def __init__(self, dsn: str, *, answer: float) -> None:
        self._dsn = dsn
        self._answer = answer
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="relay-doorbell", daemon=True)
        self.rings = 0
        self.listening = False

    def start(self) -> None:
        """Begins to listen; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Wakes everybody and leaves within a second or the answer of the database."""
        self._ended.set()
        self._ring(listening=False)
        self._thread.join(HEAR_SECONDS + self._answer)

    def wait(self, heard: int, seconds: float) -> bool:
        """Sleeps until there was a ring after `heard`; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.rings != heard, seconds)

    def wake(self) -> None:
        """As a ring that nobody sent: everybody looks again."""
        self._ring(listening=self.listening)

    def _ring(self, *, listening: bool) -> None:
        with self._changed:
            self.listening = listening
            self.rings += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with connect(self._dsn, autocommit=True, answer_within=self._answer) as conn:
                    conn.execute(LISTEN)
                    self._ring(listening=True)
                    self._hear(conn)
            except (FencepostError, psycopg.Error) as error:
                self._ring(listening=False)
                log.warning("the doorbell is out of order, the relay polls: %s", type(error).__name__)
                self._ended.wait(AGAIN_SECONDS)

    def _hear(self, conn: Connection[Any]) -> None:
        asked = time.monotonic()
        while not self._ended.is_set():
            if time.monotonic() - asked > ASK_SECONDS:
                # A connection that died without a sign would never ring again.
                conn.execute(THERE)
                asked = time.monotonic()
            marks = {found.payload for found in conn.notifies(timeout=HEAR_SECONDS, stop_after=1)}
            if marks:
                self._ring(listening=True)
            for mark in marks:
                if mark.isascii() and mark.isdigit():
                    conn.execute(RUNG, {"mark": int(mark)})


class Sleeper:
    """How one loop rests: first the mark, then another look, then sleep."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._heard = 0
        self._marked = False
        self._may = False
        self._until = 0.0
        self._pause = WRITER_FIRST_SECONDS

    def awake(self) -> None:
        """There was something to do."""
        self._marked = False
        self._pause = WRITER_FIRST_SECONDS

    def rest(self, conn: Connection[Any], seconds: float) -> bool:
        """Called when there is nothing to do; returns when it is time to look again, True after a ring.

        The first call marks and returns, so that the caller looks once more; the next sleeps, at most `seconds`.
        """
        seconds = min(seconds, LONGEST_SECONDS)
        if seconds <= 0:
            self._marked = False
            return False
        if not self._bell.listening:
            self._marked = False
            self._bell.wait(self._bell.rings, seconds)
            return False
        if not self._marked:
            self._heard = self._bell.rings
            row = conn.execute(DOZE, {"seconds": seconds + MARGIN_SECONDS}).fetchone()
            self._marked, self._may = True, row is not None and row[0] is True
            self._until = time.monotonic() + seconds
            return False
        self._marked = False
        left = max(0.0, self._until - time.monotonic())
        if not self._may:
            left = min(left, self._pause)
            self._pause = min(WRITER_LONGEST_SECONDS, self._pause * 1.5)
        return self._bell.wait(self._heard, left)
