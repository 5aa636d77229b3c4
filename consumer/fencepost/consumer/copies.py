"""Copies of one operation in one process: one of them holds a connection, the others wait for it without one.

The database decides which copy is handled. This only keeps copies that would wait there from taking a whole pool with
them; copies in other processes are waited for in the database, one in each process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

__all__ = ["AsyncCopies", "Copies"]


@dataclass(slots=True)
class _Turn:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class Copies:
    """Turns by key, for threads; what nobody uses is not kept."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._turns: dict[Hashable, _Turn] = {}

    @contextmanager
    def turn(self, key: Hashable, seconds: float) -> Generator[bool, None, None]:
        """True while it is this caller's turn; False when it did not come within ``seconds``."""
        with self._guard:
            turn = self._turns.setdefault(key, _Turn())
            turn.users += 1
        mine = False
        try:
            mine = turn.lock.acquire(timeout=seconds)
            yield mine
        finally:
            if mine:
                turn.lock.release()
            with self._guard:
                turn.users -= 1
                if not turn.users:
                    del self._turns[key]


@dataclass(slots=True)
class _AsyncTurn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AsyncCopies:
    """As `Copies`, for asyncio; turns are of the event loop that asks."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._turns: dict[Hashable, _AsyncTurn] = {}

    @asynccontextmanager
    async def turn(self, key: Hashable, seconds: float) -> AsyncGenerator[bool, None]:
        """As `Copies.turn`."""
        here = (asyncio.get_running_loop(), key)
        with self._guard:
            turn = self._turns.setdefault(here, _AsyncTurn())
            turn.users += 1
        mine = False
        try:
            if turn.users == 1:
                mine = await turn.lock.acquire()  # nobody to wait for
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        mine = await turn.lock.acquire()
            yield mine
        finally:
            if mine:
                turn.lock.release()
            with self._guard:
                turn.users -= 1
                if not turn.users:
                    del self._turns[here]
