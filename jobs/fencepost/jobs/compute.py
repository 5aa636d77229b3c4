"""Computation in processes of its own: it uses other cores, may crash or be killed, and has no authority to lose.

What runs there gets values and returns a value; it sees neither the database nor the claim.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

from fencepost.schemas.errors import ComputationDied, InvalidInput

__all__ = ["Computers"]

T = TypeVar("T")

LOOK_SECONDS = 0.2
REAP_SECONDS = 10.0


class Computers:
    """Up to ``size`` processes, each started when it is first needed and used by one computation at a time; thread-safe."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size or os.cpu_count() or 1
        self._free = threading.Condition()
        self._idle: list[Computer] = []
        self._all: set[Computer] = set()
        self._closed = False

    def run(
        self,
        function: Callable[..., T],
        args: tuple[object, ...],
        timeout: float | None,
        given_up: threading.Event | None = None,
    ) -> T:
        """What ``function(*args)`` returns or raises; waits for a free process, then ``timeout`` seconds at most.

        Once ``given_up`` is set, nobody waits for the result: it is not begun, or its process is killed. Raises
        ComputationDied when its process ended (killed, out of memory, crashed, too late, worker stopped), InvalidInput when
        function or args cannot be sent to another process.
        """
        try:
            sent = pickle.dumps((function, args))
        except Exception as error:  # noqa: BLE001 (pickle raises what it likes; its text may quote values)
            raise InvalidInput(
                f"function or args cannot be sent to another process ({type(error).__name__})",
                field="function",
                hint="a function at module level, and values that can be pickled",
            ) from None
        given_up = given_up or threading.Event()
        with self._borrowed(given_up) as computer:
            returned, value = computer.ask(sent, timeout, given_up)
        if returned:
            return cast(T, value)
        raise value

    @contextmanager
    def _borrowed(self, given_up: threading.Event) -> Generator[Computer]:
        with self._free:
            while not (self._closed or self._idle or len(self._all) < self._size):
                if given_up.is_set():
                    raise ComputationDied("nobody waits for it any more", field="computation")
                self._free.wait(LOOK_SECONDS)
            if self._closed:
                raise ComputationDied("the worker stops", field="computation")
            computer = self._idle.pop() if self._idle else Computer()
            self._all.add(computer)
        try:
            yield computer
        finally:
            with self._free:
                if computer.alive and not self._closed:
                    self._idle.append(computer)
                else:
                    self._all.discard(computer)
                    computer.kill()
                self._free.notify()

    def close(self) -> None:
        """Kills every process; whoever waits for one gets ComputationDied."""
        with self._free:
            self._closed = True
            for computer in self._all:
                computer.kill()
            self._free.notify_all()


class Computer:
    """One process that computes one thing after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="fencepost-compute", daemon=True)
        self._process.start()
        # Invariant: only the child holds its end, so its death is seen at once, and ours by it.
        theirs.close()
        self.alive = True

    def ask(self, sent: bytes, timeout: float | None, given_up: threading.Event) -> tuple[bool, Any]:
        """Whether the function returned, and what; ComputationDied when the process is gone or too late."""
        self.alive = False
        try:
            self._pipe.send_bytes(sent)
            until = None if timeout is None else time.monotonic() + timeout
            while not self._pipe.poll(LOOK_SECONDS if until is None else min(LOOK_SECONDS, until - time.monotonic())):
                if given_up.is_set():
                    raise ComputationDied("nobody waits for it any more", field="computation")
                if until is not None and time.monotonic() >= until:
                    raise ComputationDied(f"no result within {timeout:g} s", field="timeout")
            answer = cast("tuple[bool, Any]", pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._process.join(REAP_SECONDS)
            code = self._process.exitcode
            raise ComputationDied(f"its process ended with code {code}", field="computation") from None
        self.alive = True
        return answer

    def kill(self) -> None:
        """Ends it at once."""
        self.alive = False
        self._process.kill()


def _serve(pipe: Connection) -> None:
    """The child: ends when the worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, Any] = (True, function(*args))
        except Exception as error:  # noqa: BLE001 (it belongs to the handler)
            answer = (False, error)
        try:
            raw = pickle.dumps(answer)
            if not answer[0]:
                pickle.loads(raw)
            pipe.send_bytes(raw)
        except (EOFError, OSError):
            return
        except Exception as error:  # noqa: BLE001 (what cannot be sent back is told by its type)
            what = "its result" if answer[0] else f"its {type(answer[1]).__name__}"
            told = InvalidInput(f"{what} cannot be sent back ({type(error).__name__})", field="result")
            pipe.send_bytes(pickle.dumps((False, told)))


def _end_with(parent: int) -> None:
    """A worker that was killed leaves no computation behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
