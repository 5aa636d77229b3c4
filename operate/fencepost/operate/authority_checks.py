"""Checks of authority: armed or why not, the witness file against the database's tip, and whether it still beats."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, LiteralString

from psycopg import Connection

from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.operate.printing import age
from fencepost.schemas.arming import Tip, as_witness, read_tip, settled
from fencepost.schemas.errors import ConfigError, Damaged, NewerFormat, Unreachable
from fencepost.schemas.witness import Record, Witness

__all__ = ["armed", "heartbeat", "witness"]

BEAT_SECONDS_MAX = 15.0
LOOKS, LOOK_SECONDS = 5, 0.05
BEAT: LiteralString = "SELECT extract(epoch FROM clock_timestamp() - t.beat_at)::float FROM fencepost.tip() AS t"


def armed(conn: Connection[Any], state: Path | Witness) -> Finding:
    """Armed, or the reason and what to do."""
    tip, record = _look(conn, state)
    if tip.armed:
        return ok("armed", "this database may publish, claim and dispatch")
    if isinstance(record, Record) and tip.sealed and difference(record, tip) is None:
        return fail(
            "armed",
            "DISARMED, sealed for a planned move, nothing is published, claimed or dispatched; once it was restarted or runs"
            " elsewhere a relay or a worker arms it; to take it back here: fencepost authority arm",
        )
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
    row = conn.execute(BEAT).fetchone()
    assert row is not None
    seconds = float(row[0])
    if seconds > BEAT_SECONDS_MAX:
        return warn(
            "heartbeat",
            f"the last beat was {age(seconds)} ago: nobody keeps the witness; run a relay or a worker with FENCEPOST_STATE,"
            " or `fencepost authority guard`",
        )
    return ok("heartbeat", f"{age(seconds)} ago")


def difference(record: Record, tip: Tip) -> str | None:
    """What is not equal, in words; None when the tip is the head, or the turn that was under way."""
    record = settled(record, tip)
    moves = record.head.sealed and tip.sealed
    if record.installation != tip.installation:
        return "the witness belongs to another installation; check FENCEPOST_STATE"
    if record.system_identifier != tip.system_identifier and not moves:
        return "the database runs on another system than the witness saw"
    if record.database_oid != tip.database_oid and not moves:
        return "this is another database than the witness saw: a copy or a restore"
    if record.timeline != tip.timeline and not moves:
        return "the database runs on another timeline than the witness saw"
    if (tip.seq, tip.nonce) == (record.head.seq, record.head.nonce):
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
        except NewerFormat as error:
            return read_tip(conn), f"{error.message}; {error.hint}"
        except Unreachable as error:
            return read_tip(conn), error.message
        except OSError as error:
            return read_tip(conn), f"{outside.place} cannot be read ({error.strerror}); give this login the right to"
        tip = read_tip(conn)
        if difference(record, tip) is None or look == LOOKS - 1:
            return tip, record
        time.sleep(LOOK_SECONDS)
    raise AssertionError
