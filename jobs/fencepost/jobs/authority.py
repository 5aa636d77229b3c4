"""Authority: who may act. Every change is one entry of a hash-chained history, made by an authority admin who says why.

    rotate     a new epoch for a tenant or everybody: running work is held, queued work held by comparison, begins are frozen
    restrict   a tenant suspended, a class disabled or a login revoked, and not forgotten by any restore; `lift` takes it back
    freeze     no effect begins until `thaw`; what runs goes on
    release    held work goes on under the current epoch, in batches; never with an open effect
    seal       the last turn before a planned move of the database
    within     an act of a principal that is no job, in the caller's own transaction (`principals`: who may do what)

A rotation or a restriction disarms the database, tells the witness, then makes the change and arms again in one commit, all
behind the gate. Crash here: [V] after the first step the next arm finds nothing to do, after the second it makes the change;
in between everything is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, LiteralString, NamedTuple

import psycopg
from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.within import within
from fencepost.schemas import arming
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError, InvalidInput, WitnessMismatch
from fencepost.schemas.witness import Mark, Record, Witness, confirm, intend

__all__ = [
    "By",
    "Kind",
    "Released",
    "Rotated",
    "freeze",
    "lift",
    "release",
    "restrict",
    "rotate",
    "seal",
    "thaw",
    "within",
]

Kind = Literal["tenant", "class", "principal"]

BEGIN_CHANGE: LiteralString = """
SELECT fencepost.begin_change(%(installation)s, %(seq)s, %(nonce)s, %(system_identifier)s, %(timeline)s, %(database_oid)s,
                              %(version)s)"""
IS_MINE: LiteralString = "SELECT session_user = %(subject)s"
DISARM: LiteralString = "SELECT fencepost.disarm()"
ROTATE: LiteralString = """
SELECT held, blocked FROM fencepost.rotate(
    %(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s, %(system_identifier)s, %(timeline)s, %(database_oid)s,
    %(epoch)s, %(tenant)s, %(restrictions)s::text[], %(actor)s, %(reason)s, %(evidence)s)"""
LIFT: LiteralString = "SELECT fencepost.lift(%(kind)s, %(subject)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"
FREEZE: LiteralString = "SELECT fencepost.freeze(%(tenant)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"
THAW: LiteralString = "SELECT fencepost.thaw(%(tenant)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"
RELEASE: LiteralString = """
SELECT released, open, after FROM fencepost.release_held(
    %(tenant)s, %(class)s, %(operation)s, %(limit)s, %(after)s::text[], %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""
SEAL: LiteralString = """
SELECT fencepost.seal(
    %(installation)s, %(seq)s, %(nonce)s, %(next_seq)s, %(next_nonce)s, %(system_identifier)s, %(timeline)s, %(database_oid)s,
    %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""


@dataclass(frozen=True, slots=True)
class By:
    """Who decides, why, and where the evidence can be found; ``version`` is that of the history that was looked at."""

    actor: str
    reason: str
    evidence: str = ""
    version: int | None = None

    def values(self) -> dict[str, object]:
        """As parameters of a statement."""
        return {
            "actor": self.actor,
            "reason": self.reason,
            "evidence": self.evidence or None,
            "version": self.version,
        }


class Rotated(NamedTuple):
    """The newest epoch, and how many running jobs were held, or blocked by an effect that is unknown now."""

    epoch: int
    held: int
    blocked: int


class Released(NamedTuple):
    """How many jobs were released, how many stay because an effect is open, and where to go on (None: at the end)."""

    released: int
    open: int
    after: tuple[str, str, str] | None


def rotate(dsn: str, witness: Path | Witness, by: By, *, tenant: str | None = None, dry_run: bool = False) -> Rotated:
    """Nothing under the old epoch is claimed, begun or published after it returns; ``tenant`` None: everybody's.

    Takes transactions of its own; waits at most five seconds for those who use authority now (LockNotAvailable, and nothing
    has changed). Begins are frozen until ``thaw``. Raises NotArmed, WitnessMismatch, WrongVersion.
    """
    return _turn(dsn, arming.as_witness(witness), by, lambda mark: mark.rotating(tenant), lambda r: r, dry_run)


def restrict(dsn: str, witness: Path | Witness, by: By, kind: Kind, subject: str, *, dry_run: bool = False) -> Rotated:
    """Suspends a tenant, disables a class or revokes a principal or login until it is lifted; a restore does not lift it.

    Running work of the tenant or class is held; what else of it is queued is not claimed. The login that asks is refused
    (InvalidInput). As ``rotate`` otherwise.
    """
    one = f"{_kind(kind)}:{subject}"
    if kind == "principal":
        with connect(dsn, autocommit=True, answer_within=arming.ANSWER_SECONDS) as conn:
            if conn.execute(IS_MINE, {"subject": subject}).fetchone() == (True,):
                raise InvalidInput(
                    "this is the login that asks: nobody could lift it", field="subject", hint="use another login"
                )

    def restricted(record: Record) -> Record:
        return replace(record, restrictions=tuple(dict.fromkeys((*record.restrictions, one))))

    return _turn(dsn, arming.as_witness(witness), by, Mark.following, restricted, dry_run)


def lift(dsn: str, witness: Path | Witness, by: By, kind: Kind, subject: str, *, dry_run: bool = False) -> bool:
    """Lifts a restriction, in a transaction of its own; what it held waits for a release. False when there is none."""
    held = arming.as_witness(witness)
    values = {"kind": _kind(kind), "subject": subject} | by.values()
    with held.held(), connect(dsn, answer_within=arming.ANSWER_SECONDS) as conn:
        # A witness that cannot be read would put it into force again: refused before anything is lifted.
        record = held.read()
        with conn.transaction(force_rollback=dry_run):
            found = conn.execute(LIFT, values).fetchone()
        # Crash here: [V3] lifted here and not at the witness: the next arm puts it into force again.
        if not dry_run and f"{kind}:{subject}" in record.restrictions:
            held.write(replace(record, restrictions=tuple(r for r in record.restrictions if r != f"{kind}:{subject}")))
    return found == (True,)


def freeze(conn: Connection[Any], by: By, *, tenant: str | None = None) -> None:
    """No effect of the tenant (None: of anybody) begins after the caller's commit, until the thaw. Raises NotArmed."""
    _one(conn, FREEZE, {"tenant": tenant} | by.values())


def thaw(conn: Connection[Any], by: By, *, tenant: str | None = None) -> None:
    """Effects may begin again after the caller's commit; a tenant's own freeze and everybody's are apart."""
    _one(conn, THAW, {"tenant": tenant} | by.values())


def release(
    conn: Connection[Any],
    by: By,
    *,
    tenant: str | None = None,
    job_class: str | None = None,
    operation: str | None = None,
    limit: int = 1000,
    after: tuple[str, str, str] | None = None,
) -> Released:
    """Held work, and queued work of an older epoch, goes on under the current one, in the caller's transaction.

    At most ``limit`` jobs, the next batch from ``after`` on. A job with an open effect stays held; one that was named is
    refused (EffectOpen). Raises UnknownJob, Restricted, NotArmed, WrongVersion (each batch is a new version).
    """
    values = {
        "tenant": tenant,
        "class": job_class,
        "operation": operation,
        "limit": limit,
        "after": None if after is None else list(after),
    }
    row = _one(conn, RELEASE, values | by.values())
    return Released(row[0], row[1], None if row[2] is None else (row[2][0], row[2][1], row[2][2]))


def seal(dsn: str, witness: Path | Witness, by: By, *, dry_run: bool = False) -> None:
    """Nobody uses this database's authority until it runs elsewhere, was restarted, or is armed on purpose.

    It arms itself then, on another system or timeline too, if it lost nothing on the way.
    """
    outside = arming.as_witness(witness)
    with (
        outside.held(),
        connect(dsn, answer_within=arming.ANSWER_SECONDS) as gate,
        connect(dsn, autocommit=True, answer_within=arming.ANSWER_SECONDS) as other,
    ):
        record = _begun(gate, other, outside, by)
        mark = record.head.sealing()
        if not dry_run:
            # Crash here: [V4] told and not sealed: the next beat takes the turn as any other.
            record = intend(outside, record, mark)
        gate.execute(SEAL, arming.parameters(record, mark) | by.values())
        if dry_run:
            gate.rollback()
            return
        gate.commit()
        confirm(outside, record, mark)


def _turn(
    dsn: str,
    witness: Witness,
    by: By,
    next_mark: Callable[[Mark], Mark],
    restricted: Callable[[Record], Record],
    dry_run: bool,
) -> Rotated:
    with (
        _armed_again(dsn, witness, dry_run=dry_run),
        witness.held(),
        connect(dsn, answer_within=arming.ANSWER_SECONDS) as gate,
        connect(dsn, autocommit=True, answer_within=arming.ANSWER_SECONDS) as other,
    ):
        record = restricted(_begun(gate, other, witness, by))
        mark = next_mark(record.head)
        values = arming.parameters(record, mark) | by.values()
        if dry_run:
            gate.execute(DISARM)
            row = _one(gate, ROTATE, values)
            gate.rollback()
            return Rotated(mark.epoch, row[0], row[1])
        # Crash here: [V1] disarmed, and the witness was told nothing: the next arm is one of a plain restart.
        other.execute(DISARM)
        record = intend(witness, record, mark)
        # Crash here: [V2] the witness was told: the next arm makes the change.
        row = _one(gate, ROTATE, values)
        gate.commit()
        confirm(witness, record, mark)
        return Rotated(mark.epoch, row[0], row[1])


def _begun(gate: Connection[Any], other: Connection[Any], witness: Witness, by: By) -> Record:
    """The record, equal to the tip, with the gate held; a beat that was on its way may come first, once."""
    for again in (True, False):
        record = arming.settled(witness.read(), arming.read_tip(other))
        try:
            gate.execute(BEGIN_CHANGE, arming.parameters(record, record.head) | by.values())
            return record
        except WitnessMismatch as error:
            gate.rollback()
            if not again or error.field != "ahead":
                raise
    raise AssertionError


@contextlib.contextmanager
def _armed_again(dsn: str, witness: Witness, *, dry_run: bool) -> Generator[None]:
    """After a failure half-way: armed again as it was, or with the change made, as any keeper would."""
    try:
        yield
    except (FencepostError, psycopg.Error, OSError):
        if not dry_run:
            with contextlib.suppress(FencepostError, psycopg.Error, OSError):
                arming.ensure_armed(dsn, witness)
        raise


def _kind(kind: str) -> str:
    if kind not in ("tenant", "class", "principal"):
        raise InvalidInput("a restriction is of a tenant, a class or a principal", field="kind")
    return kind


def _one(conn: Connection[Any], statement: LiteralString, values: dict[str, object]) -> tuple[Any, ...]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return row
