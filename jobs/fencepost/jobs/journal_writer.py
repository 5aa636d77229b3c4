"""Writing a journal: what was appended is on the disk when ``append`` returns, or it raised and the handle is dead.

A handle that failed once is never used again: opening anew locks, reads everything from the disk, and refuses a tail that
does not verify. A sync that failed is not repeated: the kernel may have dropped what it could not write, and the next
one would say that all is well.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn
from uuid import UUID, uuid4

from fencepost.jobs import journal_format as form
from fencepost.jobs.journal_begins import Begins
from fencepost.jobs.journal_disk import (
    UNKNOWN_MACHINE,
    Disk,
    Lock,
    is_full,
    machine_id,
    same_file,
    sync_folder,
    write_all,
)
from fencepost.jobs.journal_records import Begin, Closed, Opened, Record, Rotated, encode
from fencepost.jobs.journal_scan import Report, require_writable, scan, segment_path
from fencepost.schemas.errors import ConfigError, FencepostError, InvalidInput, JournalInUse, JournalUnusable

__all__ = ["SEGMENT_BYTES", "Writer", "create_segment", "prepare_folder"]

SEGMENT_BYTES = 16 * 1024 * 1024
SEGMENT_BYTES_MIN = 1024
NEWEST = 2

log = logging.getLogger("fencepost.jobs")


class Place(NamedTuple):
    """Where the next frame goes, and what it chains from."""

    path: Path
    number: int
    end: int
    next_seq: int
    crc: int


class Writer:
    """The one writer of a journal; safe between threads, and useless in a forked child."""

    def __init__(
        self,
        folder: Path,
        *,
        owner: str,
        machine: UUID | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        """Opens or begins the journal: reads the newest two segments, verifies those before them by their digests.

        Raises JournalInUse, JournalTorn, JournalCorrupt, JournalForeign, JournalUnusable (no room, failing disk),
        ConfigError for a folder that cannot be used.
        """
        if segment_bytes < SEGMENT_BYTES_MIN:
            raise InvalidInput(f"segment_bytes is below {SEGMENT_BYTES_MIN}", field="segment_bytes")
        self._folder = folder
        self._machine = machine_id() if machine is None else machine
        self._segment_bytes = segment_bytes
        self._disk = disk or Disk()
        self._process = os.getpid()
        self._writing = threading.Lock()
        self._syncing = threading.Lock()
        self._dead = False
        self._file = -1
        self._retired: list[int] = []
        self._place = Place(folder, 0, 0, 1, 0)
        self._start = 0
        self._begins = Begins()
        self._synced = 0
        self._lock = Lock(folder)
        try:
            prepare_folder(folder, self._disk)
            self._lock.take()
            self._begin(self._read(), owner)
        except OSError as error:
            self._drop()
            if is_full(error):
                self._die(error, "opened")
            raise ConfigError(f"the journal cannot be opened: {error.strerror}", field="journal") from None
        except BaseException:
            self._drop()
            raise

    def append(self, record: Record) -> int:
        """Its number, once it is on the disk; JournalUnusable, JournalInUse: it may or may not be there, do not go on.

        Threads that append at the same time share a sync.
        """
        seq = self.note(record)
        # Locks: syncing, then writing. Others write while this syncs; who comes late finds its record synced.
        with self._syncing:
            with self._writing:
                self._check()
                self._close_retired()
                written = self._place.next_seq - 1
                file = self._file
            if self._synced >= seq:
                return seq
            try:
                self._disk.fsync(file)
            except OSError as error:
                self._die(error, "synced")
            self._synced = max(self._synced, written)
        return seq

    def note(self, record: Record) -> int:
        """Its number, once it is written; it is on the disk with the next ``append``, or when the writer is closed."""
        payload = encode(record)
        if len(payload) > form.PAYLOAD_BYTES_MAX:
            raise InvalidInput(f"the record is larger than {form.PAYLOAD_BYTES_MAX} bytes", field="journal")
        with self._writing:
            self._check()
            # What a segment starts with may be more than it should hold: then it holds as much again.
            if self._place.end + form.frame_size(len(payload)) > max(self._segment_bytes, 2 * self._start):
                self._rotate()
            seq = self._write(payload)
            self._begins.follow(record)
            return seq

    def unmatched(self) -> list[Begin]:
        """Begins of which no later record says what became of them, whenever they were written."""
        with self._writing:
            return list(self._begins.unmatched.values())

    def matched(self) -> list[Begin]:
        """The newest begins that the database had, of the newest two segments."""
        with self._writing:
            return list(self._begins.matched.values())

    def close(self) -> None:
        """Ends the journal well: what was noted is on the disk, and a later cut would be seen. Never raises."""
        with self._syncing, self._writing:
            if not self._dead and os.getpid() == self._process:
                try:
                    self._check()
                    self._write(encode(Closed()))
                    self._sync()
                    self._state(self._file, form.OFFLINE)
                except FencepostError as error:
                    log.error("the journal was not closed well: %s", error)
            self._drop()

    def _read(self) -> Report:
        newest = max(self._folder.glob("*.journal"), default=None)
        if newest is not None:
            # What is cached may not be what the disk has, after a sync that failed: written out, dropped, read again.
            descriptor = os.open(newest, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.fsync(descriptor)
                with suppress(OSError):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                self._die(error, "synced")
            finally:
                os.close(descriptor)
        machine = None if self._machine == UNKNOWN_MACHINE else self._machine
        report = scan(self._folder, self._begins.take, machine=machine, newest=NEWEST)
        require_writable(report)
        return report

    def _begin(self, report: Report, owner: str) -> None:
        last = report.last
        if last is None:
            self._create(1, 1, form.NO_DIGEST)
        elif last.last is Rotated:
            assert last.next_seq is not None
            self._create(int(last.path.stem) + 1, last.next_seq, last.digest)
        else:
            assert last.next_seq is not None
            self._continue(Place(last.path, int(last.path.stem), last.end, last.next_seq, last.crc))
            if not last.online:
                self._state(self._file, form.ONLINE)
        for segment in report.segments:
            if segment.online and segment.path != self._place.path:
                self._seal(segment.path)
        self._write(encode(Opened(owner=owner)))
        self._sync()

    def _rotate(self) -> None:
        """Ends this segment and begins the next, whose header holds the digest of everything that is in this one."""
        before = self._place.path
        self._write(encode(Rotated()))
        self._sync()
        try:
            # Crash here: [K2] before the successor: the segment ends with its last record and is still on; who opens
            # the journal makes the successor.
            self._create(self._place.number + 1, self._place.next_seq, form.segment_digest(before.read_bytes()))
        except OSError as error:
            self._die(error, "rotated")
        self._seal(before)

    def _create(self, number: int, first_seq: int, previous: bytes) -> None:
        # Invariant: a segment starts with every begin that is unmatched when it is made, in one piece with its header:
        # who reads the newest segment knows them all.
        carried = list(self._begins.unmatched.values())
        header = form.Header(uuid4(), number, first_seq, previous, self._machine)
        self._continue(create_segment(self._folder, header, carried, self._disk))
        self._start = self._place.end

    def _seal(self, path: Path) -> None:
        """A segment whose successor is on the disk is off: from now on a missing successor would be seen."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._die(error, "rotated")
        try:
            self._state(descriptor, form.OFFLINE)
        finally:
            os.close(descriptor)

    def _continue(self, place: Place) -> None:
        file = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        if self._file >= 0:
            self._retired.append(self._file)
        self._file = file
        self._place = place

    def _write(self, payload: bytes) -> int:
        place = self._place
        data, crc = form.frame(place.next_seq, place.crc, payload)
        try:
            write_all(self._file, data, place.end, self._disk)
        except OSError as error:
            if is_full(error):
                # Nobody was told of this record: what there is of it goes again, so that the next writer finds no tail.
                with suppress(OSError):
                    os.ftruncate(self._file, place.end)
            self._die(error, "written")
        self._place = place._replace(end=place.end + len(data), next_seq=place.next_seq + 1, crc=crc)
        return place.next_seq

    def _sync(self) -> None:
        try:
            self._disk.fsync(self._file)
        except OSError as error:
            self._die(error, "synced")
        self._synced = self._place.next_seq - 1

    def _state(self, file: int, state: int) -> None:
        try:
            self._disk.write(file, bytes([state]), form.STATE_AT)
            self._disk.fsync(file)
        except OSError as error:
            self._die(error, "synced")

    def _check(self) -> None:
        if self._dead:
            raise JournalUnusable(
                "the journal failed before, and this handle is dead", field="journal", hint="open it anew"
            )
        if os.getpid() != self._process:
            raise JournalInUse(
                "the journal belongs to the process that forked this one", field="journal", hint="open one of its own"
            )
        if not (self._lock.held() and same_file(self._file, self._place.path)):
            self._dead = True
            raise JournalInUse(
                "the files of the journal were replaced or removed under its writer",
                field="journal",
                hint="nothing was written; look who uses the folder, then start the worker again",
            )

    def _die(self, error: OSError, what: str) -> NoReturn:
        self._dead = True
        raise JournalUnusable(
            f"the journal could not be {what}: {error.strerror or type(error).__name__}",
            field="journal",
            hint="make room on its disk" if is_full(error) else "look at its disk; nothing is retried on this handle",
        ) from None

    def _close_retired(self) -> None:
        while self._retired:
            os.close(self._retired.pop())

    def _drop(self) -> None:
        self._dead = True
        self._close_retired()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._lock.release()


def prepare_folder(folder: Path, disk: Disk) -> None:
    """Makes the folder, for this user alone, and its name durable."""
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        sync_folder(folder.parent, disk)


def create_segment(folder: Path, header: form.Header, records: Sequence[Record], disk: Disk) -> Place:
    """Makes a segment with these records, or replaces the one of that number: whole and durable, or not at all."""
    path = segment_path(folder, header.number)
    data = bytearray(header.encode())
    seq, crc = header.first_seq, form.checksum(bytes(data[: form.STATE_AT - 4]))
    for record in records:
        made, crc = form.frame(seq, crc, encode(record))
        data += made
        seq += 1
    new = path.with_suffix(".new")
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, bytes(data), 0, disk)
        disk.fsync(file)
    finally:
        os.close(file)
    os.replace(new, path)
    sync_folder(folder, disk)
    return Place(path, header.number, len(data), seq, crc)
