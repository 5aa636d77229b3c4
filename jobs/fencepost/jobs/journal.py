"""The runner's journal: the second witness of effect begins, outside the database and not restored with it.

    frame on the disk  ->  begin commits  ->  dispatch  ->  outcome noted  ->  outcome recorded

    what the journal says of a begin        when a worker starts, or the database was armed anew
    not begun (refused, rolled back)        nothing
    nothing                                 it counts as begun: presented, and unknown unless the database knows it
    its outcome, or that it was presented   the database had it: a database that does not is refused

Crash here: [K1] after the frame and before the begin's commit the begin is unmatched: presented by the next worker that
opens this journal, and unknown until evidence says otherwise.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import Connection

from fencepost.jobs.effects import Recorded
from fencepost.jobs.journal_begins import Begins, missing, present
from fencepost.jobs.journal_disk import Disk
from fencepost.jobs.journal_records import Acknowledged, Begin, NotBegun, Outcome, Presented, Record
from fencepost.jobs.journal_scan import scan
from fencepost.jobs.journal_writer import SEGMENT_BYTES, Writer
from fencepost.schemas.errors import (
    BeginsMissing,
    EffectUnknown,
    FencepostError,
    InvalidInput,
    JournalUnusable,
)

__all__ = ["Journal", "acknowledge"]

T = TypeVar("T")

REOPEN_SECONDS = 0.25
REOPEN_SECONDS_MAX = 10.0
OWED_MAX = 10_000

log = logging.getLogger("fencepost.jobs")


class Journal:
    """Holds every begin of one worker durably before the database hears of it; what cannot be held is not begun.

    ``folder`` belongs to one worker on one machine, on a disk that is not restored with the database. ``witness``,
    ``outcome`` may be used from any thread; the rest belongs to the worker's own.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, disk: Disk | None = None) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._disk = disk
        self._owner = ""
        self._lock = threading.Lock()
        self._beginning: set[UUID] = set()
        self._writer: Writer | None = None
        self._failed = False
        self._owed: deque[Record] = deque(maxlen=OWED_MAX)
        self._again_at = 0.0
        self._pause = REOPEN_SECONDS
        self._told = ""

    @contextmanager
    def opened(self, owner: str) -> Generator[None]:
        """Open for the length of the block; raises as ``Writer`` does when it cannot be written."""
        self._owner = owner
        self._open()
        try:
            yield
        finally:
            with self._lock:
                writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def witness(self, begin: Begin, call: Callable[[], T]) -> T:
        """Calls ``call``, which begins the effect, once the frame is on the disk; JournalUnusable when it cannot be.

        What certainly was not begun is noted as such; a begin that can neither be confirmed nor denied is not.
        """
        attempt = begin.effect_attempt
        with self._lock:
            self._beginning.add(attempt)
        try:
            self._append(begin)
            try:
                value = call()
            except EffectUnknown:
                raise
            except FencepostError as error:
                self._note(NotBegun(effect_attempt=attempt, reason=type(error).__name__))
                raise
            except psycopg.Error as error:
                if error.sqlstate is not None:
                    self._note(NotBegun(effect_attempt=attempt, reason=error.sqlstate))
                raise
            if isinstance(value, Recorded):
                self._note(NotBegun(effect_attempt=attempt, reason="recorded"))
            return value
        finally:
            with self._lock:
                self._beginning.discard(attempt)

    def outcome(self, attempt: UUID, outcome: str, reason: str | None) -> None:
        """Notes what was seen; on the disk with the next begin. Never raises: it is evidence, and no condition."""
        self._note(Outcome(effect_attempt=attempt, outcome=outcome, reason=reason))

    def usable(self) -> bool:
        """Whether a begin could be recorded now; a journal that failed is opened anew, at growing intervals."""
        if not self._failed:
            return True
        if time.monotonic() < self._again_at:
            return False
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        try:
            self._open()
        except FencepostError as error:
            self._tell(error)
            self._pause = min(self._pause * 2, REOPEN_SECONDS_MAX)
            self._again_at = time.monotonic() + self._pause
            return False
        log.warning("the journal can be written again")
        return True

    def present(self, conn: Connection[Any]) -> None:
        """Shows the database every begin that it may have lost, each in a transaction of its own.

        Raises BeginsMissing when the database does not know a begin that it had, or the job of one that it may have
        had; NotArmed.
        """
        # Locks: ours, then the writer's. Whoever is no longer beginning here has noted what certainly was not begun.
        with self._lock:
            writer = self._writer
            if writer is None:
                return
            due = [b for b in writer.unmatched() if b.effect_attempt not in self._beginning]
        lost = _presented(conn, due, self._note) + missing(conn, writer.matched())
        if lost:
            first = lost[0]
            raise BeginsMissing(
                f"{len(lost)} begins of this worker's journal are not in this database, the first: effect "
                f"{first.effect_key} of tenant {first.tenant}, operation {first.operation}",
                field="journal",
                hint="nothing is claimed: it was restored, has lost commits, or is another database; see them: fencepost "
                "journal show --missing; once each was looked into: fencepost journal acknowledge",
            )

    def _open(self) -> None:
        writer = Writer(self.folder, owner=self._owner, segment_bytes=self._segment_bytes, disk=self._disk)
        unmatched = {begin.effect_attempt for begin in writer.unmatched()}
        with self._lock:
            self._writer, self._failed = writer, False
            owed = [record for record in self._owed if getattr(record, "effect_attempt", None) in unmatched]
            self._owed.clear()
            self._pause, self._told = REOPEN_SECONDS, ""
        for record in owed:
            self._note(record)

    def _append(self, begin: Begin) -> None:
        with self._lock:
            writer = self._writer
        try:
            if writer is None or self._failed:
                raise JournalUnusable("the journal cannot be written now", field="journal", hint="its error is logged")
            writer.append(begin)
        except InvalidInput:
            raise
        except FencepostError as error:
            self._fail(error, NotBegun(effect_attempt=begin.effect_attempt, reason="not_written"))
            raise JournalUnusable(
                f"the effect was not begun: {error.message}", field="journal", hint=error.hint
            ) from error

    def _note(self, record: Record) -> None:
        with self._lock:
            writer = self._writer
        try:
            if writer is None or self._failed:
                self._owed.append(record)
                return
            writer.note(record)
        except FencepostError as error:
            self._fail(error, record)

    def _fail(self, error: FencepostError, owed: Record) -> None:
        self._owed.append(owed)
        with self._lock:
            news, self._failed = not self._failed, True
        if news:
            self._tell(error)

    def _tell(self, error: FencepostError) -> None:
        if str(error) != self._told:
            self._told = str(error)
            log.error("nothing is claimed and no effect is begun: %s", error)


def acknowledge(
    folder: Path, conn: Connection[Any], *, actor: str, reason: str, attempts: Collection[UUID] | None = None
) -> list[tuple[Begin, str]]:
    """Settles the begins that this database does not know, all or those named: unknown here, and not presented again.

    Each is presented first; only where its job does not exist either is nothing kept but the journal's own record of
    who looked into it. Returns each with what the database made of it. ``conn`` is in autocommit.
    """
    begins = Begins()
    writer = Writer(folder, owner=actor)
    try:
        scan(folder, begins.take)
        known = [*begins.unmatched.values(), *begins.matched.values()]
        chosen = [b for b in missing(conn, known) if attempts is None or b.effect_attempt in attempts]
        if attempts is not None and (other := set(attempts) - {b.effect_attempt for b in chosen}):
            raise InvalidInput(
                f"{min(map(str, other))} is no begin of this journal that the database does not know",
                field="effect_attempt",
                hint="see: fencepost journal show --missing",
            )
        done: list[tuple[Begin, str]] = []
        for begin in chosen:
            verdict = present(conn, begin)
            writer.append(Acknowledged(effect_attempt=begin.effect_attempt, actor=actor, reason=reason))
            done.append((begin, verdict))
        return done
    finally:
        writer.close()


def _presented(conn: Connection[Any], begins: Iterable[Begin], note: Callable[[Record], None]) -> list[Begin]:
    """Presents each, notes what is settled by it, and returns those that have no job here."""
    lost: list[Begin] = []
    for begin in begins:
        verdict = present(conn, begin)
        if verdict == "no_job":
            lost.append(begin)
        elif verdict != "pending":
            note(Presented(effect_attempt=begin.effect_attempt, verdict=verdict))
        if verdict == "unknown":
            log.warning(
                "effect unknown (journalled_begin): fencepost effects show --tenant %s --operation %s --effect %s",
                *(shlex.quote(text) for text in (begin.tenant, begin.operation, begin.effect_key)),
            )
    return lost
