"""Patience for calls that wait in the background for a lock of the test's: the product itself gives up after five seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psycopg

from support.jobs import Conn

T = TypeVar("T")


def patient(call: Callable[[Conn], T]) -> Callable[[Conn], T]:
    """The call, started again where it had to give up; it must be alone in the queue, for it loses its place."""

    def tried(conn: Conn) -> T:
        for _ in range(3):
            with suppress(psycopg.errors.LockNotAvailable):
                return call(conn)
        return call(conn)

    return tried
