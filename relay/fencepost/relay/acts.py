"""Operators' acts on parked events and destinations: audited, in the caller's transaction, and none of them publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection

RETRY: LiteralString = """
SELECT verdict, destinations FROM fencepost.retry_parked(%(destination)s, %(seq)s, %(actor)s, %(reason)s)"""
SKIP: LiteralString = "SELECT fencepost.skip_parked(%(destination)s, %(seq)s, %(actor)s, %(reason)s)"
REMOVE: LiteralString = """
SELECT unsent, parked FROM fencepost.remove_destination(%(destination)s, %(actor)s, %(reason)s, %(lose)s)"""


@dataclass(frozen=True, slots=True)
class Retried:
    """`due` where it was parked, or `moved` to the destinations that have a route for it now."""

    verdict: str
    destinations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What a destination had left when it was removed."""

    unsent: int
    parked: int


def retry(conn: Connection[Any], destination: str, seq: int, *, actor: str, reason: str) -> Retried:
    """Marks a parked event due; its slot's owner publishes it, in the order of its key, within its next look.

    One that was parked for want of a route goes to every destination that has one now. Raises `InvalidInput` when it is
    not parked there (`seq`) or has no route anywhere (`type`), `NotArmed`.
    """
    values = {"destination": destination, "seq": seq, "actor": actor, "reason": reason}
    row = conn.execute(RETRY, values).fetchone()
    assert row is not None
    return Retried(row[0], tuple(row[1]))


def skip(conn: Connection[Any], destination: str, seq: int, *, actor: str, reason: str) -> None:
    """Gives a parked event up: it is never published there, and its key goes on. Raises `InvalidInput`, `NotArmed`."""
    conn.execute(SKIP, {"destination": destination, "seq": seq, "actor": actor, "reason": reason})


def remove(conn: Connection[Any], destination: str, *, actor: str, reason: str, lose: bool = False) -> Removed:
    """Takes a destination away with its progress.

    Raises `InvalidInput` while a relay serves it (`destination`), or while it has unsent or parked events and `lose` is
    not set (`lose`); `NotArmed`.
    """
    values = {"destination": destination, "actor": actor, "reason": reason, "lose": lose}
    row = conn.execute(REMOVE, values).fetchone()
    assert row is not None
    return Removed(row[0], row[1])
