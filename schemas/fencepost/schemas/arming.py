"""Arming: a database may exercise authority only while its tip equals the witness; a plain restart re-arms by itself.

Everything else (a restored copy, a promoted standby, a dump, a lost or stale witness) stays disarmed, with a message,
until an operator decides.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from psycopg import Connection

from fencepost.schemas.connect import connect
from fencepost.schemas.errors import FencepostError
from fencepost.schemas.witness import FileWitness, Mark, Record

TIP = "SELECT installation, seq, nonce, system_identifier, timeline, armed FROM fencepost.tip()"
ARM = """SELECT fencepost.arm(%(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s,
                              %(system_identifier)s, %(timeline)s)"""
BEAT = """SELECT fencepost.beat(%(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s,
                                %(system_identifier)s, %(timeline)s)"""

# `arm` itself waits at most five seconds for a lock.
ANSWER_SECONDS = 15.0


class Tip(NamedTuple):
    """The database's half of the witness."""

    installation: UUID
    seq: int
    nonce: UUID
    system_identifier: int
    timeline: int
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
        witness.write(Record(tip.installation, tip.system_identifier, tip.timeline, Mark(tip.seq, tip.nonce)))


def clone_witness(source: Path, target: Path) -> None:
    """Copies a witness beside a deliberate copy of its database (test fixtures); the two then part at their first turn."""
    target.mkdir(parents=True, exist_ok=True)
    with FileWitness(source).held():
        shutil.copyfile(FileWitness(source).path, FileWitness(target).path)


def _turn(conn: Connection[tuple[object, ...]], witness: FileWitness, *, arming: bool) -> Armed:
    with witness.held():
        record = _settled(witness.read(), read_tip(conn))
        mark = record.head.following()
        # Crash here: [W] before the database commits the head stands; after it the intended mark is found as the tip.
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
            },
        )
        witness.confirm(record, mark)
        return Armed(already=False, seq=mark.seq)


def _settled(record: Record, tip: Tip) -> Record:
    """The record after a turn that crashed half-way: the tip tells whether the intended mark was taken."""
    if record.intended is not None and (tip.seq, tip.nonce) == (record.intended.seq, record.intended.nonce):
        return Record(record.installation, record.system_identifier, record.timeline, record.intended)
    return Record(record.installation, record.system_identifier, record.timeline, record.head)


def explain(error: FencepostError) -> str:
    """One line for people: what is disarmed and why."""
    return f"disarmed, nothing is published, claimed or dispatched: {error}"


__all__ = ["Armed", "Tip", "arm", "beat", "clone_witness", "create_witness", "ensure_armed", "explain", "read_tip"]
