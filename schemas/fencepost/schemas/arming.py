"""Arming: a database may exercise authority only while its tip equals the witness; a plain restart re-arms by itself.

Everything else (a restored copy, a promoted standby, a dump, a lost or stale witness) stays disarmed, with a message,
until an operator decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from psycopg import Connection

from fencepost.schemas.connect import connect
from fencepost.schemas.errors import FencepostError
from fencepost.schemas.witness import FileWitness, Mark, Record

TIP = "SELECT installation, seq, nonce, system_identifier, timeline, database_oid, armed FROM fencepost.tip()"
ARM = """SELECT fencepost.arm(%(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s,
                              %(system_identifier)s, %(timeline)s, %(database_oid)s)"""
BEAT = """SELECT fencepost.beat(%(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s,
                                %(system_identifier)s, %(timeline)s, %(database_oid)s)"""

# `arm` itself waits at most five seconds for a lock.
ANSWER_SECONDS = 15.0


class Tip(NamedTuple):
    """The database's half of the witness."""

    installation: UUID
    seq: int
    nonce: UUID
    system_identifier: int
    timeline: int
    database_oid: int
    armed: bool


@dataclass(frozen=True, slots=True)
class Armed:
    """How the database came to be armed; `already` when nothing had to be done."""

    already: bool
    seq: int


def read_tip(conn: Connection[tuple[object, ...]]) -> Tip:
    """What the database says of itself; needs the armer or reader role."""
    row = conn.execute(TIP).fetchone()
    assert row is not None
    return Tip(*row)  # type: ignore[arg-type]


def arm(dsn: str, state: Path) -> Armed:
    """Arms the database when witness and tip are equal, or raises `WitnessMismatch` and changes nothing.

    Takes a transaction of its own; waits at most five seconds for those who use authority now.
    """
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
        return _turn(conn, FileWitness(state), arming=True)


def ensure_armed(dsn: str, state: Path) -> Armed:
    """Armed as it is, or armed by equality after a plain restart; else `WitnessMismatch`."""
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
        tip = read_tip(conn)
        if tip.armed:
            return Armed(already=True, seq=tip.seq)
        return _turn(conn, FileWitness(state), arming=True)


def beat(conn: Connection[tuple[object, ...]], witness: FileWitness) -> int:
    """One heartbeat: advances witness and tip together; an older copy of the database then no longer matches."""
    return _turn(conn, witness, arming=False).seq


def create_witness(dsn: str, state: Path) -> None:
    """Begins the witness of a new installation at the tip of its database."""
    witness = FileWitness(state)
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn, witness.held():
        tip = read_tip(conn)
        here = Record(tip.installation, tip.system_identifier, tip.timeline, tip.database_oid, Mark(tip.seq, tip.nonce))
        witness.write(here)


def clone_witness(source: Path, target: Path, dsn: str) -> None:
    """Writes a witness for a deliberate copy of a database (test fixtures); the two part at their first turn."""
    target.mkdir(parents=True, exist_ok=True)
    with connect(dsn, autocommit=True) as conn, FileWitness(source).held():
        record = FileWitness(source).read()
        FileWitness(target).write(replace(record, database_oid=read_tip(conn).database_oid))


def _turn(conn: Connection[tuple[object, ...]], witness: FileWitness, *, arming: bool) -> Armed:
    with witness.held():
        record = _settled(witness.read(), read_tip(conn))
        # Invariant: one mark per turn of the database. A turn whose client went away may still commit on the server, so
        # the mark that was intended is sent again, never another one in its place.
        mark = record.intended or record.head.following()
        # Crash here: [W] before the database commits the head stands; after it the intended mark is found as the tip.
        if record.intended is None:
            record = witness.intend(record, mark)
        conn.execute(
            ARM if arming else BEAT,
            {
                "installation": record.installation,
                "seq": record.head.seq,
                "nonce": record.head.nonce,
                "next_seq": mark.seq,
                "next_nonce": mark.nonce,
                "system_identifier": record.system_identifier,
                "timeline": record.timeline,
                "database_oid": record.database_oid,
            },
        )
        witness.confirm(record, mark)
        return Armed(already=False, seq=mark.seq)


def _settled(record: Record, tip: Tip) -> Record:
    """The record after a turn that crashed half-way: the tip tells whether the intended mark was taken."""
    if record.intended is not None and (tip.seq, tip.nonce) == (record.intended.seq, record.intended.nonce):
        return replace(record, head=record.intended, intended=None)
    return record


def explain(error: FencepostError, *, armed: bool = False) -> str:
    """One line for people: what does not hold, and what follows."""
    if armed:
        return f"still armed, but it will not arm itself again: {error}"
    return f"disarmed, nothing is published, claimed or dispatched: {error}"


__all__ = ["Armed", "Tip", "arm", "beat", "clone_witness", "create_witness", "ensure_armed", "explain", "read_tip"]
