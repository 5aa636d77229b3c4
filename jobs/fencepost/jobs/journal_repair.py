"""Repair of a torn tail, on an operator's word: moved aside first, cut off after; corruption is never repaired.

crash                                    what is left                                   what the next repair does
[K3] after the copy, before the cut      the tail, and its copy in quarantine           takes the same copy, cuts
[K4] after the cut, before the record    a sound journal, the copy in quarantine        has nothing to do
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import UUID, uuid4

from fencepost.jobs import journal_format as form
from fencepost.jobs.journal_begins import Begins
from fencepost.jobs.journal_disk import UNKNOWN_MACHINE, Disk, Lock, is_full, machine_id, sync_folder, write_all
from fencepost.jobs.journal_records import Repaired
from fencepost.jobs.journal_scan import Report, Segment, require_writable, scan
from fencepost.jobs.journal_writer import Writer, create_segment
from fencepost.schemas.errors import ConfigError, JournalTorn, JournalUnusable

__all__ = ["Repair", "repair"]


@dataclass(frozen=True, slots=True)
class Repair:
    """What was moved: ``length`` bytes from ``offset`` of ``segment`` to the file ``quarantine`` beside it."""

    segment: str
    offset: int
    length: int
    quarantine: str
    digest: str


def repair(folder: Path, *, actor: str, machine: UUID | None = None, disk: Disk | None = None) -> Repair | None:
    """The verified prefix is left, the tail kept in quarantine, and the journal can be written again; None when it could.

    Raises JournalCorrupt for any other damage, JournalForeign for a journal of another machine, JournalInUse while it is
    written, JournalUnusable when the copy cannot be made durable: nothing was cut then. ConfigError without a folder.
    """
    used = disk or Disk()
    here = machine_id() if machine is None else machine
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder.name}", field="journal", hint="name the folder of a journal")
    lock = Lock(folder)
    try:
        lock.take()
        begins = Begins()
        report = scan(folder, begins.take, machine=None if here == UNKNOWN_MACHINE else here)
        try:
            require_writable(report)
            return None
        except JournalTorn:
            done = _cut(report, begins, here, used)
    except OSError as error:
        raise JournalUnusable(
            f"the tail could not be moved aside: {error.strerror or type(error).__name__}",
            field="journal",
            hint="make room on its disk, then repair again" if is_full(error) else "look at its disk; nothing is lost",
        ) from None
    finally:
        lock.release()
    # Crash here: [K4] the cut is made and not told; the copy in quarantine tells it.
    writer = Writer(folder, owner="repair", machine=here, disk=used)
    try:
        writer.append(
            Repaired(
                actor=actor, offset=done.offset, length=done.length, quarantine=done.quarantine, digest=done.digest
            )
        )
    finally:
        writer.close()
    return done


def _cut(report: Report, begins: Begins, machine: UUID, disk: Disk) -> Repair:
    torn = report.last
    assert torn is not None
    # The zeros at the end of a header that was cut are no header.
    offset = torn.end
    tail = torn.path.read_bytes()[offset:]
    kept = _quarantine(torn, offset, tail, disk)
    # Crash here: [K3] the tail is twice there, and the next repair finds its copy.
    if torn.header is None:
        before = report.segments[-2] if len(report.segments) > 1 else None
        first = 1 if before is None else before.next_seq
        assert first is not None
        digest = form.NO_DIGEST if before is None else before.digest
        header = form.Header(uuid4(), int(torn.path.stem), first, digest, machine)
        create_segment(report.folder, header, list(begins.unmatched.values()), disk)
    else:
        file = os.open(torn.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(file, offset)
            disk.fsync(file)
        finally:
            os.close(file)
    return Repair(torn.path.name, offset, len(tail), kept.name, sha256(tail).hexdigest())


def _quarantine(torn: Segment, offset: int, tail: bytes, disk: Disk) -> Path:
    """A durable copy of the tail; an equal one of an earlier repair that did not end is taken as it is."""
    for number in range(1, 1000):
        path = torn.path.with_name(f"{torn.path.name}.quarantine-{offset}" + (f"-{number}" if number > 1 else ""))
        if path.exists() and path.read_bytes() != tail:
            continue
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, tail, 0, disk)
            disk.fsync(file)
        finally:
            os.close(file)
        sync_folder(torn.path.parent, disk)
        return path
    raise JournalUnusable(
        "there are a thousand tails in quarantine at this place", field="journal", hint="look at its disk"
    )
