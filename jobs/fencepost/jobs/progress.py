"""Progress: how far the current attempt is, told about once a second at most, and never by a stale worker."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.lanes import Lanes
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_class, as_operation, as_tenant

__all__ = ["PROGRESS", "REPORT", "Progress", "Reporter", "progress", "report"]

NOTE_CHARS_MAX = 200
PAUSE_SECONDS = 1.0
REPORT: LiteralString = """
SELECT fencepost.report_progress(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s,
                                 %(fraction)s, %(note)s)"""
PROGRESS: LiteralString = """
SELECT fraction, note, attempt, at, current FROM fencepost.progress(%(tenant)s, %(operation)s, %(class)s)"""

log = logging.getLogger("fencepost.jobs")


@dataclass(frozen=True, slots=True)
class Progress:
    """What was told last; ``current`` while the attempt that told it is running."""

    fraction: float
    note: str
    attempt: UUID
    at: datetime
    current: bool


def progress(conn: Connection[Any], *, tenant: str, operation: str, job_class: str) -> Progress | None:
    """How far the job was when it last said so, or None; by the database's clock."""
    which = {"tenant": as_tenant(tenant), "operation": as_operation(operation), "class": as_class(job_class)}
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(PROGRESS, which).fetchone()
    return None if row is None else Progress(*row)


def report(conn: Connection[Any], f: Fence, fraction: float, note: str = "") -> None:
    """Notes how far this attempt is, in the caller's transaction. Raises StaleFence, NotArmed, InvalidInput."""
    _check(fraction, note)
    conn.execute(REPORT, f.parameters() | {"fraction": float(fraction), "note": note})


class Reporter:
    """Sends at most one report a second and waits for none; what comes sooner is dropped, and so is a refusal."""

    def __init__(self, f: Fence, lanes: Lanes, pause: float = PAUSE_SECONDS) -> None:
        self._fence = f
        self._lanes = lanes
        self._pause = pause
        self._lock = threading.Lock()
        self._next = 0.0
        self._sent: Future[None] | None = None

    def tell(self, fraction: float, note: str) -> None:
        """From any thread; InvalidInput for what could never be stored."""
        _check(fraction, note)
        now = time.monotonic()
        with self._lock:
            if now < self._next or self._sent is not None and not self._sent.done():
                return
            self._next = now + self._pause
            self._sent = self._lanes.send(lambda conn: report(conn, self._fence, fraction, note))
        self._sent.add_done_callback(_dropped)


def _dropped(sent: Future[None]) -> None:
    if (error := sent.exception()) is not None:
        log.debug("a progress report was not taken: %s", type(error).__name__)


def _check(fraction: float, note: str) -> None:
    if not 0 <= fraction <= 1:
        raise InvalidInput("fraction is not between 0 and 1", field="fraction")
    if len(note) > NOTE_CHARS_MAX or "\x00" in note:
        raise InvalidInput(f"note is longer than {NOTE_CHARS_MAX} characters or holds U+0000", field="note")
