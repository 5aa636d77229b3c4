"""Every process started here is ended with us: by `atexit` in the ordinary case, by the guard when we are killed."""

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

from .guard import Born, born, end

_lock = threading.Lock()
_owned: dict[int, tuple[Born, int]] = {}
_guard: "subprocess.Popen[bytes] | None" = None
_owner = os.getpid()
_kept = False


def own(pid: int, stop_signal: int) -> Born | None:
    """Takes responsibility for a process that leads its own group; returns it with its birth."""
    process = born(pid)
    if process is None:
        return None
    with _lock:
        _owned[pid] = (process, stop_signal)
        _tell(f"+ {process.pid} {process.ticks} {stop_signal}")
    return process


def disown(pid: int) -> None:
    """Forgets a process that has ended."""
    with _lock:
        if _owned.pop(pid, None) is not None:
            _tell(f"- {pid}")


def own_folder(folder: Path) -> None:
    """Lets the guard remove this folder when we are killed."""
    with _lock:
        _tell(f"folder {folder}")


def keep() -> list[tuple[Born, int]]:
    """Leaves everything running when this process ends; returns what that is, in order of start."""
    global _kept
    with _lock:
        _kept = True
        _tell("keep")
        left = list(_owned.values())
        _owned.clear()
        return left


def kept() -> bool:
    """Whether `keep` was called."""
    return _kept


def _tell(line: str) -> None:
    global _guard
    if os.getpid() != _owner:
        return
    if _guard is None:
        _guard = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    if _guard.stdin is not None:
        try:
            _guard.stdin.write(line.encode() + b"\n")
            _guard.stdin.flush()
        except BrokenPipeError:
            return


def _finish() -> None:
    if os.getpid() != _owner:
        return
    end(_owned.values())
    _owned.clear()
    if _guard is not None and _guard.stdin is not None:
        _guard.stdin.close()
        try:
            _guard.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _guard.kill()


atexit.register(_finish)
