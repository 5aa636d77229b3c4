"""Ends what a process has started when that process dies without saying goodbye (SIGKILL, `os._exit`).

Runs as a process of its own and reads lines from standard input: `+ PID BORN SIGNAL` and `- PID` for processes,
`folder PATH` for a folder to remove, `keep` to leave all of it alone. The end of the input is the signal to act.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Born:
    """A process by number and birth, so that a number used again is never mistaken for ours."""

    pid: int
    ticks: int

    def alive(self) -> bool:
        return born(self.pid) == self

    def signal_group(self, number: int) -> None:
        """Signals the group of this very process; does nothing when it is gone."""
        if not self.alive():
            return
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return


def born(pid: int) -> Born | None:
    """The process with this number, or None when there is none or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else Born(pid, int(fields[19]))


def end(processes: Iterable[tuple[Born, int]]) -> None:
    """Ends each process group, last started first: its own stop signal, then SIGKILL after a grace period."""
    for process, number in reversed(list(processes)):
        process.signal_group(signal.SIGCONT)
        process.signal_group(number)
        deadline = time.monotonic() + GRACE_SECONDS
        while process.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.signal_group(signal.SIGKILL)


def main(lines: Iterable[str]) -> None:
    """Keeps the list until the input ends, then ends what is left on it."""
    processes: dict[int, tuple[Born, int]] = {}
    folders: list[str] = []
    for line in lines:
        match line.rstrip("\n").split(" ", 1):
            case ["+", rest]:
                pid, ticks, number = (int(word) for word in rest.split())
                processes[pid] = (Born(pid, ticks), number)
            case ["-", pid]:
                processes.pop(int(pid), None)
            case ["folder", path]:
                folders.append(path)
            case ["keep"]:
                processes.clear()
                folders.clear()
            case _:
                continue
    end(processes.values())
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    main(sys.stdin)
