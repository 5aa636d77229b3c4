"""What a journal asks of the file system: the one port between it and the disk, and the lock that keeps it to one writer."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid5

from fencepost.schemas.errors import JournalInUse

__all__ = ["UNKNOWN_MACHINE", "Disk", "Lock", "is_full", "machine_id", "same_file", "sync_folder", "write_all"]

MACHINE_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
MACHINE_NAMESPACE = UUID("0d9f6f0e-5f0a-5c39-8d0d-4a6f2f8b7c11")
UNKNOWN_MACHINE = UUID(int=0)
LOCK_SECONDS = 2.0
LOCK_POLL_SECONDS = 0.02
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class Disk:
    """The calls whose failure a journal must survive; tests put their own in place."""

    write: Callable[[int, bytes, int], int] = os.pwrite
    fsync: Callable[[int], None] = os.fsync


class Lock:
    """One writer for each journal: a lock of the kernel's on the file ``lock``, gone with the process that holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._descriptor = -1

    def take(self, within: float = LOCK_SECONDS) -> None:
        """Raises JournalInUse when another process, or another writer of this one, still has it by then."""
        until = time.monotonic() + within
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Invariant: the lock is on the file that has this name now; one on a removed file keeps nobody out.
                if same_file(descriptor, self._path):
                    self._descriptor = descriptor
                    return
            os.close(descriptor)
            if time.monotonic() >= until:
                raise JournalInUse(
                    f"the journal {self._path.parent.name} is written by another process",
                    field="journal",
                    hint="each worker needs a folder of its own; end the other process first if it is to be replaced",
                )
            time.sleep(LOCK_POLL_SECONDS)

    def held(self) -> bool:
        """Whether the lock still keeps others out."""
        return self._descriptor >= 0 and same_file(self._descriptor, self._path)

    def release(self) -> None:
        """Lets others in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def same_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def sync_folder(folder: Path, disk: Disk) -> None:
    """Makes names in the folder durable: new files, renamed ones."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: int, data: bytes, offset: int, disk: Disk) -> None:
    """Writes all of it, or raises OSError with some of it written."""
    written = 0
    while written < len(data):
        written += disk.write(file, data[written:], offset + written)


def is_full(error: OSError) -> bool:
    """Whether there was no room: a disk, a quota or a limit is full."""
    return error.errno in FULL


def machine_id() -> UUID:
    """Names this machine without telling its own id; all zeros where it has none, as in many containers."""
    for path in MACHINE_FILES:
        with suppress(OSError):
            if found := path.read_text(encoding="ascii", errors="replace").strip():
                return uuid5(MACHINE_NAMESPACE, found)
    return UNKNOWN_MACHINE
