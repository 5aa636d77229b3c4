"""Journals for tests: small ones, images of what a crash leaves, and disks that fail on request."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from fencepost.jobs.journal_disk import Disk
from fencepost.jobs.journal_records import NotBegun, Record
from fencepost.jobs.journal_scan import Frame, Report, scan
from fencepost.jobs.journal_writer import Writer

HERE = UUID(int=7)
"""A machine."""

QUICK = Disk(fsync=lambda _: None)
"""A disk that is not waited for: what a test kills is not its power."""


def fact(number: int) -> NotBegun:
    """A small record that tells its number."""
    return NotBegun(effect_attempt=UUID(int=number), reason="x", at="t")


def facts(records: list[Record]) -> list[int]:
    """The numbers of those."""
    return [r.effect_attempt.int for r in records if isinstance(r, NotBegun)]


def read(folder: Path, machine: UUID | None = None) -> tuple[Report, list[Record]]:
    """The report and every record that verifies."""
    found: list[Record] = []

    def take(frame: Frame) -> None:
        found.append(frame.record)

    return scan(folder, take, machine=machine), found


def writer(folder: Path, *, disk: Disk = QUICK, segment_bytes: int = 1 << 20, machine: UUID = HERE) -> Writer:
    """A writer that is not waited for."""
    return Writer(folder, owner="test", machine=machine, segment_bytes=segment_bytes, disk=disk)


def written(folder: Path, count: int, *, segment_bytes: int = 1 << 20, start: int = 1) -> Path:
    """A journal with that many facts, closed."""
    made = writer(folder, segment_bytes=segment_bytes)
    for number in range(start, start + count):
        made.note(fact(number))
    made.close()
    return folder


def crashed(folder: Path, count: int, *, segment_bytes: int = 1 << 20) -> Path:
    """What a kill leaves of one: a copy that was taken while it was open."""
    live = folder.with_name(folder.name + "-live")
    made = writer(live, segment_bytes=segment_bytes)
    for number in range(1, count + 1):
        made.append(fact(number))
    shutil.copytree(live, folder)
    made.close()
    return folder


class Faulty:
    """A disk whose next calls fail with the error that was planned; counts its syncs."""

    def __init__(self) -> None:
        self.fail_sync = 0
        self.fail_write = 0
        self.syncs = 0
        self.disk = Disk(write=self._write, fsync=self._fsync)
        self.before_sync: Callable[[], None] | None = None

    def _write(self, file: int, data: bytes, offset: int) -> int:
        if self.fail_write:
            half = os.pwrite(file, data[: len(data) // 2], offset)
            if half:
                raise OSError(self.fail_write, os.strerror(self.fail_write))
        return os.pwrite(file, data, offset)

    def _fsync(self, _: int) -> None:
        self.syncs += 1
        if self.before_sync is not None:
            self.before_sync()
        if self.fail_sync:
            raise OSError(self.fail_sync, os.strerror(self.fail_sync))


FULL = errno.ENOSPC
BROKEN = errno.EIO
