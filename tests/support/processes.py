"""Python child processes that tests kill, stop and continue, and waits that poll state instead of sleeping."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from stack import ownership
from stack.process import stop_group

Value = TypeVar("Value")
POLL_SECONDS = 0.02


def wait_for(found: Callable[[], Value | None], within: float, what: str) -> Value:
    """Returns the first value of `found()` that is neither None nor False; AssertionError naming `what` at the deadline."""
    deadline = time.monotonic() + within
    while True:
        value = found()
        if value is not None and value is not False:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within:.0f} s in vain for: {what}")
        time.sleep(POLL_SECONDS)


class Child:
    """A Python child in its own process group; ended on exit, and with the test session at the latest."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        output: Path,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.output = output
        self._arguments = [python, *arguments]
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def script(cls, source: str, *, folder: Path, arguments: Sequence[str] = (), **env: str) -> Self:
        """A child that runs this source text; its output goes to a file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("child-*.py")))
        path = folder / f"child-{number}.py"
        path.write_text(source)
        return cls([str(path), *arguments], output=folder / f"child-{number}.out", env=env)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._running().pid

    @property
    def alive(self) -> bool:
        """Whether it has not exited (a stopped one is alive)."""
        return self._child is not None and self._child.poll() is None

    @property
    def text(self) -> str:
        """What it has printed so far, on both streams."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def start(self) -> None:
        """Starts it; an earlier run must have ended."""
        assert not self.alive, "the child is still running"
        with self.output.open("ab") as file:
            self._child = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        ownership.own(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to the group; returns when it is gone. Nothing to do when it has ended."""
        if self._child is None:
            return
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(timeout=10)
        ownership.disown(self._child.pid)

    def terminate(self, within: float = 20.0) -> int:
        """SIGTERM, as an operator would; returns the exit code, AssertionError with its output when it stays."""
        child = self._running()
        if child.poll() is None:
            os.kill(child.pid, signal.SIGTERM)
        return self.wait(within)

    def wait(self, within: float = 30.0) -> int:
        """The exit code once it has ended by itself; AssertionError with its last output when it does not."""
        child = self._running()
        try:
            code = child.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the child did not end within {within:.0f} s:\n{self.text[-2000:]}") from None
        ownership.disown(child.pid)
        return code

    def pause(self) -> None:
        """SIGSTOP to the group; returns when the kernel says that every thread of it has stopped."""
        stop_group(self.pid)

    def resume(self) -> None:
        """SIGCONT to the group."""
        os.killpg(self.pid, signal.SIGCONT)

    def says(self, words: str, within: float = 60.0) -> None:
        """Returns once it has printed `words`; AssertionError with its output when it ended or the time is over."""
        deadline = time.monotonic() + within
        while words not in self.text:
            ended = not self.alive
            if (ended and words not in self.text) or time.monotonic() > deadline:
                raise AssertionError(f"the child never said {words!r} (ended: {ended}):\n{self.text[-2000:]}")
            time.sleep(POLL_SECONDS)

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._child is not None, "the child was never started"
        return self._child
