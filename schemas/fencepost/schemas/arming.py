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

from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError
from fencepost.schemas.witness import FileWitness, Mark, Record, Witness, confirm, intend

TIP = """SELECT installation, seq, nonce, system_identifier, timeline, database_oid, armed, epoch, sealed
FROM fencepost.tip()"""
ARM = """SELECT fencepost.arm(%(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s,
                              %(system_identifier)s, %(timeline)s, %(database_oid)s,
                              %(epoch)s, %(tenant)s, %(restrictions)s::text[], %(sealed)s, %(unseal)s)"""
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
    epoch: int
    sealed: bool


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


def as_witness(state: Path | Witness) -> Witness:
    """A folder is that of the file witness."""
    return FileWitness(state) if isinstance(state, Path) else state


def arm(dsn: str, state: Path | Witness, *, unseal: bool = False) -> Armed:
    """Arms the database when witness and tip are equal, or raises `WitnessMismatch` and changes nothing.

    Takes a transaction of its own; waits at most five seconds for those who use authority now. `unseal` breaks a seal
    where it was written.
    """
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
        return _turn(conn, as_witness(state), arming=True, unseal=unseal)


def ensure_armed(dsn: str, state: Path | Witness) -> Armed:
    """Armed as it is, or armed by equality after a plain restart; else `WitnessMismatch`."""
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
        tip = read_tip(conn)
        if tip.armed:
            return Armed(already=True, seq=tip.seq)
        return _turn(conn, as_witness(state), arming=True)


def beat(conn: Connection[tuple[object, ...]], witness: Witness) -> int:
    """One heartbeat: advances witness and tip together; an older copy of the database then no longer matches."""
    return _turn(conn, witness, arming=False).seq


def create_witness(dsn: str, state: Path | Witness) -> None:
    """Begins the witness of a new installation at the tip of its database."""
    witness = as_witness(state)
    with connect(dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn, witness.held():
        tip = read_tip(conn)
        mark = Mark(tip.seq, tip.nonce, tip.epoch)
        witness.write(Record(tip.installation, tip.system_identifier, tip.timeline, tip.database_oid, mark))


def clone_witness(source: Path, target: Path, dsn: str) -> None:
    """Writes a witness for a deliberate copy of a database (test fixtures); the two part at their first turn."""
    target.mkdir(parents=True, exist_ok=True)
    with connect(dsn, autocommit=True) as conn, FileWitness(source).held():
        record = FileWitness(source).read()
        FileWitness(target).write(replace(record, database_oid=read_tip(conn).database_oid))


def parameters(record: Record, mark: Mark) -> dict[str, object]:
    """What every turn tells the database: what the witness says it is, and what it becomes."""
    return {
        "installation": record.installation,
        "seq": record.head.seq,
        "nonce": record.head.nonce,
        "next_seq": mark.seq,
        "next_nonce": mark.nonce,
        "system_identifier": record.system_identifier,
        "timeline": record.timeline,
        "database_oid": record.database_oid,
        "epoch": mark.epoch,
        "tenant": mark.tenant,
        "restrictions": list(record.restrictions),
    }


def _turn(conn: Connection[tuple[object, ...]], witness: Witness, *, arming: bool, unseal: bool = False) -> Armed:
    with witness.held():
        tip = read_tip(conn)
        record = settled(witness.read(), tip)
        # Invariant: one mark per turn of the database. A turn whose client went away may still commit on the server, so
        # the mark that was intended is sent again, never another one in its place.
        mark = record.intended or record.head.following()
        # Crash here: [W] before the database commits the head stands; after it the intended mark is found as the tip.
        if record.intended is None:
            record = intend(witness, record, mark)
        if arming:
            conn.execute(ARM, parameters(record, mark) | {"sealed": record.head.sealed, "unseal": unseal})
        else:
            conn.execute(BEAT, parameters(record, mark))
        if record.head.sealed:
            # The database may have moved under its seal.
            record = moved(record, tip)
        confirm(witness, record, replace(mark, sealed=False))
        return Armed(already=False, seq=mark.seq)


def settled(record: Record, tip: Tip) -> Record:
    """The record after a turn that crashed half-way: the tip tells whether the intended mark, or a recovery's, was taken."""
    if record.recovering is not None and (tip.seq, tip.nonce) == (record.recovering.seq, record.recovering.nonce):
        return moved(replace(record, head=record.recovering, intended=None, recovering=None), tip)
    if record.intended is not None and (tip.seq, tip.nonce) == (record.intended.seq, record.intended.nonce):
        return replace(record, head=replace(record.intended, sealed=tip.sealed), intended=None)
    return record


def moved(record: Record, tip: Tip) -> Record:
    """The record of a database that runs elsewhere from now on."""
    return replace(
        record, system_identifier=tip.system_identifier, timeline=tip.timeline, database_oid=tip.database_oid
    )


def explain(error: FencepostError, *, armed: bool = False) -> str:
    """One line for people: what does not hold, and what follows."""
    if armed:
        return f"still armed, but it will not arm itself again: {error}"
    return f"disarmed, nothing is published, claimed or dispatched: {error}"


__all__ = [
    "Armed",
    "Tip",
    "arm",
    "as_witness",
    "beat",
    "clone_witness",
    "create_witness",
    "ensure_armed",
    "explain",
    "moved",
    "parameters",
    "read_tip",
    "settled",
]
