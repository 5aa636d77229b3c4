"""Recovery: a restored database acts again only under an epoch beyond the witness's, with what it lost held for evidence.

what the restored database says          what recovery makes of it
job done                                 stays; its effects too
job running, queued, waiting, held       held; blocked where an effect is unknown
job cancelled, poison                    stays, under another generation
any job that is not done                 suspect: begins nothing that was not reconciled
effect success, resolved_applied         stays
effect pending, failed_before_dispatch,  unknown, by no attempt; "not applied" only after the longest call of its class
  resolved_not_applied
effect that it does not know             none is made up; a runner's journal or a reconciliation makes it
event not acked                          sent again, in a new era
position of a Kafka consumer             stays; the consumer goes back to it by itself
event handled from RabbitMQ, and lost    gone from its queue: a backfill sends it again
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

from psycopg import Connection
from psycopg.rows import class_row

from fencepost.jobs.authority import By
from fencepost.jobs.journal_begins import missing, present
from fencepost.jobs.journal_evidence import Evidence
from fencepost.jobs.journal_records import Begin
from fencepost.schemas import arming
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError, Damaged, EvidenceMissing, InvalidInput
from fencepost.schemas.witness import Mark, Record, Witness, confirm

__all__ = ["Consumer", "Hold", "Recovered", "consumers", "holds", "present_journals", "recover"]

# Numbers of events that may have been given in what was lost: the next ones are beyond them.
NUMBERS = 1_000_000
ANSWER_SECONDS = 3600.0
EPOCH_FLOOR_MAX = 10**12
# How long a message may have waited in its queue, and how far clocks may differ.
MARGIN = timedelta(hours=1)

RECOVER: LiteralString = """
SELECT epoch, era, jobs, unknown, unsent FROM fencepost.recover(
    %(installation)s, %(next_seq)s, %(next_nonce)s, %(epoch)s, %(restrictions)s::text[], %(numbers)s,
    %(actor)s, %(reason)s, %(evidence)s)"""
RESTRICTIONS: LiteralString = "SELECT r.kind || ':' || r.subject FROM fencepost.restriction AS r ORDER BY 1"
LOST: LiteralString = """
SELECT fencepost.note_lost_begin(%(tenant)s, %(operation)s, %(class)s, %(effect_key)s, %(effect_attempt)s)"""
HOLDS: LiteralString = """
SELECT h.what, h.owner, h.tenant, h.class AS job_class, h.count, h.oldest FROM fencepost.holds() AS h
ORDER BY h.what, h.owner, h.tenant, h.class"""
CONSUMERS: LiteralString = """
SELECT c.consumer, c.positions, c.noted_at, c.handled_until FROM fencepost.consumer_recovery AS c ORDER BY c.consumer"""


@dataclass(frozen=True, slots=True)
class Hold:
    """What does not proceed by itself, and whose it is; ``can resume`` needs a release and nothing else."""

    what: str
    owner: str
    tenant: str | None
    job_class: str | None
    count: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Consumer:
    """How far a consumer had come in what was restored: so many ``positions`` in Kafka, the newest noted at ``noted_at``.

    ``handled_until`` is the time that the youngest handled event carries, None where none was.
    """

    consumer: str
    positions: int
    noted_at: datetime | None
    handled_until: datetime | None

    @property
    def backfill_from(self) -> datetime | None:
        """What it reads from RabbitMQ has to be sent again from here on; earlier where messages wait longer than an hour.

        None where nothing was ever handled: from the oldest that is retained.
        """
        return None if self.handled_until is None else self.handled_until - MARGIN


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery did: ``jobs`` are suspect, ``unknown`` effects need evidence, ``unsent`` events are sent again.

    ``presented`` begins of the journals are unknown, or were known; ``lost`` ones belong to jobs that this database does
    not have. ``damaged`` journals could be read in part only. ``already`` when the database was armed: only the journals were
    presented. ``consumers`` are those that had handled anything, as they were at the recovery.
    """

    epoch: int
    era: int = 0
    jobs: int = 0
    unknown: int = 0
    unsent: int = 0
    presented: int = 0
    lost: tuple[Begin, ...] = ()
    damaged: tuple[str, ...] = ()
    holds: tuple[Hold, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    already: bool = False


def recover(
    dsn: str,
    witness: Path | Witness,
    by: By,
    *,
    journals: Sequence[Path] = (),
    numbers: int = NUMBERS,
    epoch_floor: int | None = None,
    dry_run: bool = False,
) -> Recovered:
    """Arms a restored database under a new epoch, frozen, with everything held; says what can resume and what cannot.

    Takes transactions of its own. Applications must not write meanwhile: it waits five seconds for open transactions that
    enqueue or submit (LockNotAvailable, and nothing has changed). ``journals`` are the runners' folders: their begins that
    this database lost are unknown, or noted where the job is lost too. ``numbers``: more than the events per restore that
    were lost. ``epoch_floor``: no epoch beyond it was ever given; where the witness is lost or cannot be read a new one is begun
    with it, on evidence (EvidenceMissing). Call it again after a crash. Raises ConfigError for a folder that is no journal and
    for a lost witness, Damaged for one that cannot be read, WitnessMismatch for another installation's, NewerFormat before
    anything is changed where a newer version wrote the witness or a journal.
    """
    outside = arming.as_witness(witness)
    _require_floor(epoch_floor, by)
    evidence = [Evidence(folder) for folder in journals]
    with outside.held(), connect(dsn, answer_within=ANSWER_SECONDS) as conn:
        tip = arming.read_tip(conn)
        if tip.armed and epoch_floor is not None:
            raise InvalidInput(
                "the database is armed: there is nothing to recover",
                field="epoch_floor",
                hint="only where its witness is lost: restart the server, which disarms it, then recover",
            )
        if tip.armed:
            # A recovery that died after its commit may not have come to the journals.
            presented, lost, damaged = present_journals(conn, evidence, dry_run=dry_run)
            found = tuple(holds(conn))
            known = tuple(consumers(conn))
            if dry_run:
                conn.rollback()
            return Recovered(
                tip.epoch,
                presented=presented,
                lost=lost,
                damaged=damaged,
                holds=found,
                consumers=known,
                already=True,
            )
        record = _told(conn, outside, tip, epoch_floor)
        mark = beyond(record, tip, epoch_floor or 1, *(each.epoch for each in evidence))
        # A sequence does not go back with a transaction: a dry run leaves it alone.
        values = arming.parameters(record, mark) | {"numbers": 0 if dry_run else numbers} | by.values()
        if not dry_run:
            # Crash here: [U1] told and not recovered: as disarmed as before; a recovery begins anew, one epoch further. Where
            # the witness saw the database last is told after it: before, a keeper would arm this one as it is.
            record = replace(record, recovering=mark)
            outside.write(record)
        row = conn.execute(RECOVER, values).fetchone()
        assert row is not None
        epoch, era, jobs, unknown, unsent = row
        done = Recovered(epoch, era, jobs, unknown, unsent, consumers=tuple(consumers(conn)))
        if dry_run:
            presented, lost, damaged = present_journals(conn, evidence, dry_run=True)
            done = replace(done, presented=presented, lost=lost, damaged=damaged, holds=tuple(holds(conn)))
            conn.rollback()
            return done
        conn.commit()
        # Crash here: [U2] recovered and not confirmed: the recovery's turn is found as the tip.
        confirm(outside, replace(arming.moved(record, tip), recovering=None), mark)
        presented, lost, damaged = present_journals(conn, evidence)
        return replace(done, presented=presented, lost=lost, damaged=damaged, holds=tuple(holds(conn)))


def beyond(record: Record, tip: arming.Tip, *epochs: int) -> Mark:
    """A turn and an epoch that neither the witness nor the database nor anybody else has ever seen.

    Invariant: the epoch is counted from the witness; the restored database has forgotten the newest ones.
    """
    seq = max(tip.seq, *(mark.seq for mark in record.marks))
    return Mark(seq + 1, uuid4(), max(record.epoch, tip.epoch, *epochs) + 1)


def _require_floor(floor: int | None, by: By) -> None:
    if floor is None:
        return
    if not 1 <= floor <= EPOCH_FLOOR_MAX:
        raise InvalidInput(f"the floor is not between 1 and {EPOCH_FLOOR_MAX}", field="epoch_floor")
    if not by.evidence:
        raise EvidenceMissing(
            "there is no evidence of how far epochs were given", field="evidence", hint="say where it can be found"
        )


def _told(conn: Connection[Any], witness: Witness, tip: arming.Tip, floor: int | None) -> Record:
    """What the witness says; where it is lost, and a floor is given in its place, the beginning of a new one."""
    try:
        return witness.read()
    except (ConfigError, Damaged):
        if floor is None:
            raise
    restrictions = tuple(str(row[0]) for row in conn.execute(RESTRICTIONS).fetchall())
    # Invariant: no database has this head, so that none is armed by it: only the recovery's own turn is found.
    head = Mark(tip.seq, uuid4(), max(tip.epoch, floor))
    return Record(
        tip.installation, tip.system_identifier, tip.timeline, tip.database_oid, head, restrictions=restrictions
    )


def present_journals(
    conn: Connection[Any], journals: Iterable[Evidence], *, dry_run: bool = False
) -> tuple[int, tuple[Begin, ...], tuple[str, ...]]:
    """Every begin in those journals is known to the database or unknown in it, or noted with its lost job; commits each.

    Returns how many were presented, those of lost jobs, and the journals that do not verify to their end. With ``dry_run``
    nothing is committed: the caller rolls back.
    """
    presented, lost = 0, list[Begin]()

    def take(begins: list[Begin]) -> None:
        nonlocal presented
        unknown = missing(conn, begins)
        presented += len(begins) - len(unknown)
        for begin in unknown:
            verdict = present(conn, begin)
            if verdict == "no_job":
                conn.execute(
                    LOST,
                    {
                        "tenant": begin.tenant,
                        "operation": begin.operation,
                        "class": begin.job_class,
                        "effect_key": begin.effect_key,
                        "effect_attempt": begin.effect_attempt,
                    },
                )
                lost.append(begin)
            presented += verdict != "pending"
            if not dry_run:
                conn.commit()

    evidence = list(journals)
    for each in evidence:
        each.each(take)
    return presented, tuple(lost), tuple(str(each.folder) for each in evidence if each.damaged)


def holds(conn: Connection[Any]) -> list[Hold]:
    """What does not proceed by itself, with its owner; works on a disarmed database too."""
    with conn.cursor(row_factory=class_row(Hold)) as cursor:
        return cursor.execute(HOLDS).fetchall()


def consumers(conn: Connection[Any]) -> list[Consumer]:
    """Every consumer of this database as it was at the last recovery; empty before the first."""
    with conn.cursor(row_factory=class_row(Consumer)) as cursor:
        return cursor.execute(CONSUMERS).fetchall()
