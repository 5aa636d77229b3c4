"""Operators' acts on dead letters and on what a consumer remembers: audited, in the caller's transaction.

None of them handles anything: a retry is handled by its consumer, through its inbox.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, LiteralString

from psycopg import Connection

__all__ = ["discard", "keep_type", "read", "release", "retry", "set_retention"]

RETRY: LiteralString = "SELECT fencepost.retry_dead_letter(%(id)s, %(unhandled)s, %(actor)s, %(reason)s)"
RELEASE: LiteralString = "SELECT fencepost.release_dead_letter(%(id)s, %(actor)s, %(reason)s)"
DISCARD: LiteralString = "SELECT fencepost.discard_dead_letter(%(id)s, %(actor)s, %(reason)s)"
READ: LiteralString = "SELECT r.headers, r.payload FROM fencepost.read_dead_letter(%(id)s, %(actor)s, %(reason)s) AS r"
SET: LiteralString = """
SELECT fencepost.set_inbox_retention(%(consumer)s, %(window)s::interval, %(actor)s, %(reason)s)"""
KEEP: LiteralString = "SELECT fencepost.keep_type(%(consumer)s, %(type)s, %(forever)s, %(actor)s, %(reason)s)"


def retry(conn: Connection[Any], dead_letter: int, *, actor: str, reason: str, unhandled: bool = False) -> None:
    """Marks a dead letter due; its consumer handles it in its idle time, once, and a conflict stays a conflict.

    ``unhandled`` says that an event older than the purge horizon was not handled before it; needed there, refused
    elsewhere. Raises `InvalidInput` when there is no such letter (`id`), when that word is missing or wrong
    (`unhandled`), when no runner could take it (`coordinates`), or when it needs a release (`epoch`); `NotArmed`.
    """
    conn.execute(RETRY, {"id": dead_letter, "unhandled": unhandled, "actor": actor, "reason": reason})


def release(conn: Connection[Any], dead_letter: int, *, actor: str, reason: str) -> None:
    """Lets an event of an old epoch be handled under the present one; its consumer handles it in its idle time, once.

    For the role authority admin only. It holds until the tenant's epoch changes again. What was reserved by `reserve_in`
    is let in when it is delivered again, and its letter stays until it is discarded. Raises `InvalidInput` when there is
    no such letter (`id`), or when it was set aside for something else (`epoch`); `NotArmed`.
    """
    conn.execute(RELEASE, {"id": dead_letter, "actor": actor, "reason": reason})


def discard(conn: Connection[Any], dead_letter: int, *, actor: str, reason: str) -> None:
    """Gives a dead letter up: its content goes, the decision with its digest stays. Raises `InvalidInput`, `NotArmed`."""
    conn.execute(DISCARD, {"id": dead_letter, "actor": actor, "reason": reason})


def read(conn: Connection[Any], dead_letter: int, *, actor: str, reason: str) -> tuple[list[list[object]], bytes]:
    """Headers and payload of a dead letter; who read them, and why, is kept. Raises `InvalidInput`."""
    row = conn.execute(READ, {"id": dead_letter, "actor": actor, "reason": reason}).fetchone()
    assert row is not None
    return row[0], bytes(row[1])


def set_retention(
    conn: Connection[Any], consumer: str, replay_window: timedelta | None, *, actor: str, reason: str
) -> None:
    """Declares how long a consumer remembers what it handled; None for ever, which is also what is not declared.

    Older events are refused from the next purge on. Raises `InvalidInput` (`replay_window`) for one that is shorter
    than what the broker keeps, as far as that is known.
    """
    conn.execute(SET, {"consumer": consumer, "window": replay_window, "actor": actor, "reason": reason})


def keep_type(
    conn: Connection[Any], consumer: str, type: str, *, actor: str, reason: str, forever: bool = True
) -> None:
    """Declares that a consumer never forgets operations of a type, whatever its window, or no longer."""
    conn.execute(KEEP, {"consumer": consumer, "type": type, "forever": forever, "actor": actor, "reason": reason})
