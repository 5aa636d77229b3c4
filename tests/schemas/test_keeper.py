"""The keeper beats, hands over, re-arms by equality only, and says once when it may not."""

import logging
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from fencepost.schemas import arming
from fencepost.schemas.keeper import Keeper
from fencepost.schemas.witness import FileWitness
from support.database import Database
from support.processes import wait_for

DISARM = "DELETE FROM fencepost.ticket"
# Ends within a test by being aged only.
LONG_LEASE = "SELECT fencepost.lease_duty('witness', %(owner)s, interval '60 s')"


@contextmanager
def kept(database: Database) -> Generator[Keeper]:
    keeper = Keeper(database.dsn, database.state)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()


def seq(conn: psycopg.Connection[tuple[object, ...]]) -> int:
    row = conn.execute("SELECT seq FROM fencepost.tip").fetchone()
    assert row is not None and isinstance(row[0], int)
    return row[0]


def test_a_keeper_advances_witness_and_database_together(database: Database) -> None:
    with database.connect(autocommit=True) as conn, kept(database) as keeper:
        before = seq(conn)
        wait_for(lambda: seq(conn) >= before + 2, 15, "two beats")
        keeper.stop()
        assert FileWitness(database.state).read().head.seq == seq(conn)


def test_a_disarmed_database_is_armed_again_when_witness_and_tip_are_equal(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(DISARM)
        assert conn.execute("SELECT fencepost.armed()").fetchone() == (False,)
        with kept(database):
            wait_for(lambda: conn.execute("SELECT fencepost.armed()").fetchone() == (True,), 15, "armed again")


def test_a_database_behind_its_witness_stays_disarmed_and_that_is_said_once(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with database.connect(autocommit=True) as conn, caplog.at_level(logging.ERROR, "fencepost.keeper"):
        conn.execute(DISARM)
        conn.execute("UPDATE fencepost.tip SET seq = seq - 1")
        with kept(database) as keeper:
            wait_for(lambda: "disarmed" in caplog.text, 15, "the loud line")
            lease = conn.execute("SELECT lease_until FROM fencepost.duty").fetchone()
            wait_for(lambda: conn.execute("SELECT lease_until FROM fencepost.duty").fetchone() != lease, 60, "a turn")
            keeper.stop()
        assert conn.execute("SELECT fencepost.armed()").fetchone() == (False,)
        assert caplog.text.count("disarmed") == 1


def test_a_second_keeper_takes_over_when_the_duty_is_free(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Keeper.__module__}.LEASE", LONG_LEASE)
    with database.connect(autocommit=True) as conn, kept(database):
        wait_for(lambda: conn.execute("SELECT FROM fencepost.duty").rowcount == 1, 15, "the first holder")
        first = conn.execute("SELECT owner FROM fencepost.duty").fetchone()
        with kept(database):
            before = seq(conn)
            wait_for(lambda: seq(conn) > before, 15, "a beat of the first")
            assert conn.execute("SELECT owner FROM fencepost.duty").fetchone() == first
            conn.execute("UPDATE fencepost.duty SET owner = gen_random_uuid(), lease_until = now() - interval '1 s'")
            before = seq(conn)
            wait_for(lambda: seq(conn) > before, 15, "a beat of whoever took over")


def test_a_keeper_that_cannot_beat_leaves_the_duty_to_one_that_can(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arming.clone_witness(database18.state, tmp_path, database18.dsn)
    with database18.connect(autocommit=True) as conn, caplog.at_level(logging.ERROR, "fencepost.keeper"):
        arming.beat(conn, FileWitness(database18.state))
        with kept(Database(database18.dsn, tmp_path)):
            wait_for(lambda: "the witness is stale" in caplog.text, 15, "the one whose witness is stale")
            before = seq(conn)
            with kept(database18):
                wait_for(lambda: seq(conn) >= before + 2, 30, "two beats of the other")


def test_a_keeper_survives_the_loss_of_its_connection(database: Database) -> None:
    with database.connect(autocommit=True) as conn, kept(database):
        before = seq(conn)
        wait_for(lambda: seq(conn) > before, 15, "a beat")
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'fencepost'"
        )
        before = seq(conn)
        wait_for(lambda: seq(conn) > before, 15, "a beat on a new connection")


def test_without_a_witness_the_keeper_says_so_and_waits(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    kept_back = database.state.with_name(database.state.name + ".away")
    database.state.rename(kept_back)
    caplog.set_level(logging.ERROR, "fencepost.keeper")
    with database.connect(autocommit=True) as conn, kept(database):
        wait_for(lambda: "there is no witness" in caplog.text, 15, "the line")
        shutil.rmtree(database.state, ignore_errors=True)
        kept_back.rename(database.state)
        before = seq(conn)
        wait_for(lambda: seq(conn) > before, 20, "a beat once the witness is back")
