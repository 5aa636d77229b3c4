"""`fencepost authority guard`: beats and maintains, survives its own death, and arms nothing that is not a plain restart."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from fencepost.schemas import arming
from fencepost.schemas.witness import FileWitness
from support.command_line import Fencepost, running
from support.database import Database, Databases
from support.jobs import Conn, begun, claimed, effect, given
from support.processes import wait_for
from support.restores import recovered, restores
from support.roles import separated

GUARD = ("authority", "guard")
BEATING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%fencepost.beat%' AND pid <> pg_backend_pid()"""


def beaten(conn: Conn) -> None:
    """Returns after one more turn of the witness."""
    seq = arming.read_tip(conn).seq
    wait_for(lambda: arming.read_tip(conn).seq > seq, 20, "a beat")


def disarm(conn: Conn) -> None:
    conn.execute("DELETE FROM fencepost.ticket")


def armed(conn: Conn) -> bool:
    return arming.read_tip(conn).armed


def duties(conn: Conn) -> set[str]:
    return {
        str(row[0]) for row in conn.execute("SELECT name FROM fencepost.duty WHERE lease_until > clock_timestamp()")
    }


@contextlib.contextmanager
def blocked_beat(database: Database, conn: Conn) -> Generator[None]:
    """The next beat has told the witness and waits inside the database; it may go on at the end of the block."""
    with database.connect() as holder:
        holder.execute("SELECT FROM fencepost.tip FOR UPDATE")
        wait_for(lambda: conn.execute(BEATING).fetchone() == (1,), 20, "a beat to wait for the tip")
        assert FileWitness(database.state).read().intended is not None
        yield


def test_a_guard_beats_arms_again_after_a_restart_and_ends_when_it_is_told_to(
    database18: Database, tmp_path: Path
) -> None:
    with running(database18, *GUARD, folder=tmp_path) as guard, database18.connect(autocommit=True) as conn:
        beaten(conn)
        disarm(conn)
        wait_for(lambda: armed(conn), 20, "the guard to arm it again")
        beaten(conn)
        assert guard.terminate() == 0
        tip, record = arming.read_tip(conn), FileWitness(database18.state).read()
        assert (record.head.seq, record.head.nonce, record.intended) == (tip.seq, tip.nonce, None)
        assert "draining" in guard.text and "Traceback" not in guard.text


def test_a_guard_that_is_killed_inside_a_beat_is_followed_by_one_that_goes_on(
    database18: Database, tmp_path: Path
) -> None:
    with running(database18, *GUARD, folder=tmp_path) as guard, database18.connect(autocommit=True) as conn:
        beaten(conn)
        with blocked_beat(database18, conn):
            guard.kill()
        # The server was restarted meanwhile, and nobody was there; the lease of who died has ended.
        wait_for(lambda: conn.execute(BEATING).fetchone() == (0,), 20, "the orphaned beat to end")
        disarm(conn)
        conn.execute("UPDATE fencepost.duty SET lease_until = clock_timestamp()")

        guard.start()

        wait_for(lambda: armed(conn), 20, "the next guard to arm it again")
        beaten(conn)
        assert guard.terminate() == 0
        assert FileWitness(database18.state).read().head.seq == arming.read_tip(conn).seq


def test_a_guard_leaves_a_restored_database_disarmed_until_an_operator_recovers_it(
    databases18: Databases, tmp_path: Path
) -> None:
    with restores(databases18) as made:
        backup = made.backup()
        with running(made.live, *GUARD, folder=tmp_path), made.live.connect(autocommit=True) as conn:
            disarm(conn)
            wait_for(lambda: armed(conn), 20, "the control: the live one is armed again")
        old = made.restored(backup)
        (tmp_path / "old").mkdir()
        with running(old, *GUARD, folder=tmp_path / "old") as guard, old.connect(autocommit=True) as conn:
            wait_for(lambda: "disarmed, nothing is published" in guard.text, 20, "the guard to say so")
            assert not armed(conn)

            recovered(old)

            beaten(conn)
            assert armed(conn) and guard.terminate() == 0


def test_a_guard_does_the_maintenance_of_a_database_that_nobody_else_maintains(
    database18: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    horizon = "SELECT isfinite(horizon) FROM fencepost.consumer WHERE consumer = 'reports'"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        begun(conn, claimed(conn).fence)
        conn.execute("UPDATE fencepost.effect SET state = 'unknown'")
        conn.execute("UPDATE fencepost.effect SET unknown_since = unknown_since - interval '2 hours'")
        assert effect(conn, "severity") == "normal"
        kept = fencepost(
            database18, "inbox", "retention", "--consumer", "reports", "--replay-window", "30d", "--reason", "why"
        )
        assert kept.code == 0 and conn.execute(horizon).fetchone() == (False,)
        with running(database18, *GUARD, folder=tmp_path) as guard:
            wait_for(lambda: effect(conn, "severity") == "high", 20, "the escalation")
            wait_for(lambda: conn.execute(horizon).fetchone() == (True,), 20, "the horizon")
            wait_for(lambda: {"witness", "recycling", "inbox reports"} <= duties(conn), 20, "every duty to be held")
            assert guard.terminate() == 0


def test_a_guard_does_what_its_login_may_and_says_what_it_may_not(databases18: Databases, tmp_path: Path) -> None:
    with (
        separated(databases18) as roles,
        roles.database.connect(autocommit=True) as conn,
        running(roles.login("armer"), "--verbose", *GUARD, folder=tmp_path) as guard,
    ):
        beaten(conn)
        said = ("may not recycle the outbox", "may not escalate effects", "may not purge inboxes")
        wait_for(lambda: all(line in guard.text for line in said), 20, "what it may not")
        beaten(conn)
