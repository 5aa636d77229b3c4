"""Checks of authority: armed or why not, the witness file against the database's tip, and whether it still beats."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from psycopg import Connection
from psycopg.rows import class_row

from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.operate.printing import age
from fencepost.schemas.arming import as_witness
from fencepost.schemas.errors import ConfigError, Damaged, Unreachable
from fencepost.schemas.witness import Record, Witness

__all__ = ["Tip", "armed", "heartbeat", "read_tip", "witness"]

BEAT_SECONDS_MAX = 15.0
LOOKS, LOOK_SECONDS = 5, 0.05
TIP: LiteralString = """
SELECT t.installation, t.seq, t.nonce, t.system_identifier, t.timeline, t.database_oid, t.armed, t.beat_at,
       extract(epoch FROM clock_timestamp() - t.beat_at)::float AS beat_seconds
FROM fencepost.tip() AS t"""


class Tip(NamedTuple):
    """The database's half of the witness, with the age of its last beat."""

    installation: UUID
    seq: int
    nonce: UUID
    system_identifier: int
    timeline: int
    database_oid: int
    armed: bool
    beat_at: datetime
    beat_seconds: float


def read_tip(conn: Connection[Any]) -> Tip:
    """What the database says of itself; needs the armer or reader role."""
    with conn.cursor(row_factory=class_row(Tip)) as cursor:
        found = cursor.execute(TIP).fetchone()
    assert found is not None
    return found


def armed(conn: Connection[Any], state: Path | Witness) -> Finding:
    """Armed, or the reason and what to do."""
    tip, record = _look(conn, state)
    if tip.armed:
        return ok("armed", "this database may publish, claim and dispatch")
    if isinstance(record, Record) and difference(record, tip) is None:
        return fail(
            "armed",
            "DISARMED after a plain restart, nothing is published, claimed or dispatched; start a relay or a worker, or run"
            " `fencepost migrate`: the witness is equal and each of them arms it again",
        )
    if isinstance(record, Record):
        return fail(
            "armed",
            f"DISARMED, nothing is published, claimed or dispatched: {difference(record, tip)}; find out what was restored"
            " or lost, then: fencepost authority recover",
        )
    return fail(
        "armed",
        "DISARMED, nothing is published, claimed or dispatched, and the witness cannot be asked; see the line `witness`",
    )


def witness(conn: Connection[Any], state: Path | Witness) -> Finding:
    """The file is there and says the same as the database."""
    tip, record = _look(conn, state)
    path = as_witness(state).place
    if isinstance(record, str):
        return fail("witness", f"{record}; without it nothing arms this database after its next restart")
    found = difference(record, tip)
    if found is not None:
        return fail("witness", f"{path}: {found}")
    return ok("witness", f"{path} is equal at turn {tip.seq}")


def heartbeat(conn: Connection[Any]) -> Finding:
    """Somebody beats the witness; without that an older copy of the database would not be noticed."""
    seconds = read_tip(conn).beat_seconds
    if seconds > BEAT_SECONDS_MAX:
        return warn(
            "heartbeat",
            f"the last beat was {age(seconds)} ago: nobody keeps the witness; run a relay or a worker with FENCEPOST_STATE,"
            " or `fencepost authority guard`",
        )
    return ok("heartbeat", f"{age(seconds)} ago")


def difference(record: Record, tip: Tip) -> str | None:
    """What is not equal, in words; None when the tip is the head, or the turn that was under way."""
    if record.installation != tip.installation:
        return "the witness belongs to another installation; check FENCEPOST_STATE"
    if record.system_identifier != tip.system_identifier:
        return "the database runs on another system than the witness saw"
    if record.database_oid != tip.database_oid:
        return "this is another database than the witness saw: a copy or a restore"
    if record.timeline != tip.timeline:
        return "the database runs on another timeline than the witness saw"
    marks = [record.head] if record.intended is None else [record.head, record.intended]
    if any((m.seq, m.nonce) == (tip.seq, tip.nonce) for m in marks):
        return None
    if tip.seq < record.head.seq:
        return "the database is behind its witness: it was restored from an older copy"
    if tip.seq > record.head.seq:
        return "the database is ahead of its witness: the witness is stale"
    return "database and witness took different turns"


def _look(conn: Connection[Any], state: Path | Witness) -> tuple[Tip, Record | str]:
    """Both halves; looked at again when a beat may have passed in between. A text says why there is no record."""
    outside = as_witness(state)
    for look in range(LOOKS):
        try:
            record = outside.read()
        except ConfigError as error:
            return read_tip(conn), f"{error.message}; point FENCEPOST_STATE to the folder that `fencepost migrate` made"
        except Damaged as error:
            return read_tip(conn), f"{error.message}; restore nothing over it"
        except Unreachable as error:
            return read_tip(conn), error.message
        except OSError as error:
            return read_tip(conn), f"{outside.place} cannot be read ({error.strerror}); give this login the right to"
        tip = read_tip(conn)
        if difference(record, tip) is None or look == LOOKS - 1:
            return tip, record
        time.sleep(LOOK_SECONDS)
    raise AssertionError
