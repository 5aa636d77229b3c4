"""Copies of one operation in one process: one of them holds a connection, the others wait for it without one.

The database decides which copy is handled. This only keeps copies that would wait there from taking a whole pool with
them; copies in other processes are waited for in the database, one in each process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from contextlib import suppress
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

    def turn(self, key: Hashable, seconds: float) -> _Waiting:
        """True while it is this caller's turn; False when it did not come within ``seconds``."""
        return _Waiting(self._guard, self._turns, key, seconds)


class _Waiting:
    """One caller's turn. A class, because it is on the way of every message, and a generator costs twice as much."""

    __slots__ = ("_guard", "_key", "_mine", "_seconds", "_turn", "_turns")

    def __init__(self, guard: threading.Lock, turns: dict[Hashable, _Turn], key: Hashable, seconds: float) -> None:
        self._guard = guard
        self._turns = turns
        self._key = key
        self._seconds = seconds
        self._mine = False

    def __enter__(self) -> bool:
        with self._guard:
            turn = self._turns.get(self._key)
            if turn is None:
                turn = self._turns[self._key] = _Turn()
            turn.users += 1
        self._turn = turn
        try:
            self._mine = turn.lock.acquire(timeout=self._seconds)
        except BaseException:
            self.__exit__()
            raise
        return self._mine

    def __exit__(self, *error: object) -> None:
        if self._mine:
            self._turn.lock.release()
        with self._guard:
            self._turn.users -= 1
            if not self._turn.users:
                del self._turns[self._key]


@dataclass(slots=True)
class _AsyncTurn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AsyncCopies:
    """As `Copies`, for asyncio; turns are of the event loop that asks."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._turns: dict[Hashable, _AsyncTurn] = {}

    def turn(self, key: Hashable, seconds: float) -> _AsyncWaiting:
        """As `Copies.turn`."""
        return _AsyncWaiting(self._guard, self._turns, (asyncio.get_running_loop(), key), seconds)


class _AsyncWaiting:
    """As `_Waiting`, for asyncio."""

    __slots__ = ("_guard", "_key", "_mine", "_seconds", "_turn", "_turns")

    def __init__(self, guard: threading.Lock, turns: dict[Hashable, _AsyncTurn], key: Hashable, seconds: float) -> None:
        self._guard = guard
        self._turns = turns
        self._key = key
        self._seconds = seconds
        self._mine = False

    async def __aenter__(self) -> bool:
        with self._guard:
            turn = self._turns.get(self._key)
            if turn is None:
                turn = self._turns[self._key] = _AsyncTurn()
            turn.users += 1
            alone = turn.users == 1
        self._turn = turn
        try:
            if alone:
                self._mine = await turn.lock.acquire()  # nobody to wait for
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds):
                        self._mine = await turn.lock.acquire()
        except BaseException:
            self._leave()
            raise
        return self._mine

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._mine:
            self._turn.lock.release()
        with self._guard:
            self._turn.users -= 1
            if not self._turn.users:
                del self._turns[self._key]
