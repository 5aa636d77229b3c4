"""What many processes need and one of them makes: a folder of the cache, complete or not there at all."""

import fcntl
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from .process import Unavailable

POLL_SECONDS = 0.1


def prepared(folder: Path, make: Callable[[Path], Path], within: float) -> Path:
    """The folder, made by one process at a time and seen by nobody before it is complete.

    `make` gets an empty folder to work in and returns what is to become ours. What it raises is raised here, and the
    next who waits makes its own attempt. Raises Unavailable when others took longer than `within` seconds.
    """
    if folder.is_dir():
        return folder
    with _alone(folder.with_name(f"{folder.name}.lock"), within):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as scratch:
                make(Path(scratch)).rename(folder)
    return folder


@contextmanager
def _alone(path: Path, within: float) -> Generator[None]:
    """Holds the lock on this file, which the kernel takes away from a process that dies."""
    deadline = time.monotonic() + within
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"another process did not finish {path.stem} within {within:.0f} s") from None
                time.sleep(POLL_SECONDS)
        yield
