"""Recoveries that fail or die half-way: what they leave behind arms nothing that was not recovered, and nothing is left undone."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from fencepost.jobs import recovery
from fencepost.jobs.claim import claim
from fencepost.schemas import arming
from fencepost.schemas.errors import NotArmed, WitnessMismatch
from fencepost.schemas.witness import FileWitness
from support.database import Databases
from support.jobs import CLASS, given, show
from support.restores import Restores, recovered, restores


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_recovery_that_failed_arms_no_copy_that_was_not_recovered(made: Restores, asked_before: bool) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
    # Its tip is equal, as a promoted standby's may be that lost what came after the last beat.
    copy = made.restored(made.copy())
    if asked_before:
        with pytest.raises(WitnessMismatch):
            arming.ensure_armed(copy.dsn, copy.state)  # the control
    with copy.connect() as writing:
        writing.execute("LOCK TABLE fencepost.outbox IN ROW EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            recovered(copy)
        writing.rollback()

    # What every keeper does a moment later.
    with pytest.raises(WitnessMismatch):
        arming.ensure_armed(copy.dsn, copy.state)

    with copy.connect(autocommit=True) as conn, pytest.raises(NotArmed):
        claim(conn, "a", [CLASS], 1)
    # Nothing was decided yet: the database that was copied goes on.
    with made.live.connect(autocommit=True) as conn:
        arming.beat(conn, FileWitness(made.live.state))
        assert claim(conn, "a", [CLASS], 1)
    assert recovered(copy).jobs == 1
    with copy.connect(autocommit=True) as conn:
        assert show(conn) == "held"
        arming.beat(conn, FileWitness(copy.state))
    with made.live.connect(autocommit=True) as conn, pytest.raises(WitnessMismatch):
        arming.beat(conn, FileWitness(made.live.state))


def test_a_recovery_that_died_before_its_witness_was_told_the_end_is_found_by_the_next_beat(
    made: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = made.restored(made.copy())

    def dies(*_: object) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "confirm", dies)
        with pytest.raises(OSError):
            recovered(copy)

    with copy.connect(autocommit=True) as conn:
        arming.beat(conn, FileWitness(copy.state))
        assert recovered(copy).already
        conn.execute("DELETE FROM fencepost.ticket")
    assert not arming.ensure_armed(copy.dsn, copy.state).already
    with made.live.connect(autocommit=True) as conn, pytest.raises(WitnessMismatch):
        arming.beat(conn, FileWitness(made.live.state))
