"""One process of a service: started in its own group, watched until ready, ended by us and nobody else."""

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from . import ownership

LOG_LINES = 15
LOG_BYTES = 16_384
POLL_SECONDS = 0.05
STOPPED_SECONDS = 0.002
ENDED_SECONDS = 0.01


class Unavailable(RuntimeError):
    """A service cannot be had here; the message says what to install or set."""


class StartFailed(Unavailable):
    """A service did not become ready in time; the message ends with the last lines of its log."""


class Process:
    """A child process in its own session that is ended with us at the latest.

    `stop_signal` asks for an orderly end. Restarting is calling `start` again: same command, folder and log.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        hold_stdin: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._env = dict(os.environ if env is None else env)
        self._cwd = cwd
        self._user = user
        self._stop_signal = stop_signal
        self._stdin = subprocess.PIPE if hold_stdin else subprocess.DEVNULL
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id; also the id of its group. Raises RuntimeError when it was never started."""
        if self._child is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists and has not exited (a stopped one counts as running)."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts the command; returns at once, before the service is ready."""
        if self.running:
            return
        with self.log.open("ab") as output:
            entry = None if self._user is None else pwd.getpwnam(self._user)
            self._child = subprocess.Popen(
                self._argv,
                stdin=self._stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                user=None if entry is None else entry.pw_uid,
                group=None if entry is None else entry.pw_gid,
                extra_groups=None if entry is None else [],
            )
        ownership.own(self._child.pid, self._stop_signal)

    def wait_ready(self, ready: Callable[[], bool], within: float) -> None:
        """Returns once `ready()` is true; raises StartFailed with the log's last lines after `within` seconds."""
        deadline = time.monotonic() + within
        while not ready():
            if not self.running:
                code = None if self._child is None else self._child.returncode
                raise StartFailed(f"{self.name} exited with code {code} while starting:\n{self.tail()}")
            if time.monotonic() > deadline:
                report = self.tail()
                self.kill()
                raise StartFailed(f"{self.name} was not ready within {within:.0f} s:\n{report}")
            time.sleep(POLL_SECONDS)

    def tail(self) -> str:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError as error:
            return f"  (no log: {error.strerror})"
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (the log is empty)"

    def stop(self, number: signal.Signals | None = None, within: float = 20.0) -> None:
        """Asks the process to end, waits `within` seconds, then kills what is left of its group. Nothing to do when all has ended."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            self._signal_group(signal.SIGCONT)
            os.kill(child.pid, self._stop_signal if number is None else number)
            deadline = time.monotonic() + within
            # Seen, but not yet taken: until then the number is that of our group and of nobody else's.
            while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    break
                time.sleep(ENDED_SECONDS)
            os.killpg(child.pid, signal.SIGKILL)
        self._reap(child)

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash of the service would look."""
        child = self._child
        if child is not None:
            if child.poll() is None:
                self._signal_group(signal.SIGKILL)
            self._reap(child)

    def pause(self, within: float = 10.0) -> None:
        """SIGSTOP to the group; once this returns it keeps its connections and answers nothing.

        Raises Unavailable when the kernel has not stopped every thread of it `within` seconds.
        """
        if self.running:
            stop_group(self.pid, within)

    def resume(self) -> None:
        """SIGCONT to the group."""
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, number)

    def _reap(self, child: "subprocess.Popen[bytes]") -> None:
        child.wait(timeout=10)
        if child.stdin is not None:
            child.stdin.close()
        ownership.disown(child.pid)


def stop_group(group: int, within: float = 10.0) -> None:
    """SIGSTOP to a process group; returns when every thread of every process in it has stopped.

    The signal returns before that: what runs on another processor goes on for a moment, and may still answer. Raises
    Unavailable after `within` seconds, with the group running again.
    """
    deadline = time.monotonic() + within
    while True:
        # Again at every look: what was forked meanwhile may have missed it.
        os.killpg(group, signal.SIGSTOP)
        going = running_threads(group)
        if not going:
            return
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGCONT)
            raise Unavailable(f"{len(going)} threads of process group {group} did not stop within {within:.0f} s")
        time.sleep(STOPPED_SECONDS)


def running_threads(group: int) -> list[int]:
    """The threads of a process group that are neither stopped nor gone."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _state(process)[1] == group:
            try:
                threads = list((process / "task").iterdir())
            except OSError:
                continue
            found += [int(thread.name) for thread in threads if _state(thread)[0] not in "TtZXx"]
    return found


def _state(task: Path) -> tuple[str, int]:
    """State letter and process group of a process or thread; gone ones count as dead."""
    try:
        fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[2])


def run(
    argv: Sequence[str],
    *,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    within: float = 60.0,
) -> str:
    """Runs a command to its end and returns what it printed; raises Unavailable with the last lines when it fails."""
    entry = None if user is None else pwd.getpwnam(user)
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            timeout=within,
            check=False,
            user=None if entry is None else entry.pw_uid,
            group=None if entry is None else entry.pw_gid,
            extra_groups=None if entry is None else [],
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(argv[0]).name} did not end within {within:.0f} s") from error
    except OSError as error:
        raise Unavailable(f"{argv[0]} cannot be run: {error.strerror}") from error
    printed = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        last = "\n".join(f"  {line}" for line in printed.splitlines()[-LOG_LINES:])
        raise Unavailable(f"{Path(argv[0]).name} ended with code {done.returncode}:\n{last}")
    return printed
