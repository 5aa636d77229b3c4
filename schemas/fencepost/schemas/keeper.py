"""The keeper of the witness: beats while it holds the duty, and re-arms by equality after a plain restart.

One keeper at a time beats (a row lease of six seconds in the database); the others stand by. Losing the database is
not an end: the keeper reconnects with backoff until it is stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
from psycopg import Connection

from fencepost.schemas import arming
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError, NotArmed, WitnessMismatch
from fencepost.schemas.witness import Witness

__all__ = ["BEAT_SECONDS", "Keeper"]

BEAT_SECONDS = 2.0
RECONNECT_SECONDS_MAX = 10.0
# Longer than the lease of the duty, so that another keeper gets it.
STAND_BACK_SECONDS = 8.0
LEASE: LiteralString = "SELECT fencepost.lease_duty('witness', %(owner)s, interval '6 s')"

log = logging.getLogger("fencepost.keeper")


class Keeper:
    """Beats every two seconds from a daemon thread of its own, and never brings the process down.

    A database that was restarted is armed again when witness and tip are equal. When they are not, everything stays
    disarmed: that is logged once, and the keeper keeps waiting for an operator, and leaves the duty to others meanwhile: it may be
    its own login or witness that is wrong. `state` is the witness, or the folder of the file witness.
    """

    def __init__(self, dsn: str, state: Path | Witness) -> None:
        self._dsn = dsn
        self._witness = arming.as_witness(state)
        self._owner = uuid4()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fencepost-keeper", daemon=True)
        self._told = ""
        self._back_at = 0.0

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def stop(self, within: float = 10.0) -> None:
        """Ends the thread, waiting at most `within` seconds for a beat under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def _run(self) -> None:
        pause = BEAT_SECONDS / 4
        while not self._stopping.is_set():
            try:
                with connect(self._dsn, autocommit=True, answer_within=arming.ANSWER_SECONDS) as conn:
                    pause = BEAT_SECONDS / 4
                    self._keep(conn)
            except (psycopg.Error, FencepostError, OSError) as error:
                # A full disk or a lost file must not end the keeper either: it would never come back.
                self._tell("the witness does not beat: " + _short(error))
            self._stopping.wait(pause)
            pause = min(pause * 2, RECONNECT_SECONDS_MAX)

    def _keep(self, conn: Connection[tuple[Any, ...]]) -> None:
        while not self._stopping.is_set():
            self._turn(conn)
            self._stopping.wait(BEAT_SECONDS)

    def _turn(self, conn: Connection[tuple[Any, ...]]) -> None:
        if time.monotonic() < self._back_at:
            return
        row = conn.execute(LEASE, {"owner": self._owner}).fetchone()
        if row is None or row[0] is not True:
            return
        try:
            try:
                arming.beat(conn, self._witness)
            except NotArmed:
                arming.ensure_armed(self._dsn, self._witness)
                log.warning("the database was restarted; witness and database agree, armed again")
            self._told = ""
        except FencepostError as error:
            self._back_at = time.monotonic() + STAND_BACK_SECONDS
            if not isinstance(error, (WitnessMismatch, NotArmed)):
                raise
            self._tell(arming.explain(error, armed=arming.read_tip(conn).armed))

    def _tell(self, line: str) -> None:
        """Each state is told once, loudly, not at every beat."""
        if line != self._told:
            self._told = line
            log.error("%s", line)


def _short(error: BaseException) -> str:
    """An error without anything that a server or a driver may have quoted."""
    return str(error) if isinstance(error, FencepostError) else type(error).__name__
