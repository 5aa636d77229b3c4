"""Arming: by equality with the witness after a plain restart, refused with the reason after anything else."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.schemas import arming, migrate
from fencepost.schemas import witness as witnesses
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import (
    ConfigError,
    Damaged,
    NotArmed,
    Unreachable,
    WitnessMismatch,
    WrongTransaction,
)
from fencepost.schemas.witness import FileWitness, Mark, intend
from stack.postgres import PostgresServer, Stop
from support.database import Database
from support.restores import copy_database

ACT = "SELECT fencepost.tick()"


def test_an_armed_database_allows_and_a_disarmed_one_refuses(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(ACT)

        conn.execute("DELETE FROM fencepost.ticket")

        with pytest.raises(NotArmed) as caught:
            conn.execute(ACT)
        assert caught.value.hint
    arming.ensure_armed(database.dsn, database.state)
    with database.connect(autocommit=True) as conn:
        conn.execute(ACT)


@pytest.mark.parametrize("major", ["18", "15"])
@pytest.mark.parametrize("how", [Stop.FAST, Stop.IMMEDIATE])
def test_a_plain_restart_disarms_and_equality_arms_again(major: str, how: Stop, tmp_path: Path) -> None:
    server = PostgresServer(major)
    server.start()
    try:
        migrate.apply(server.dsn, state=tmp_path)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(ACT)
        server.stop(how)
        server.start()

        with psycopg.connect(server.dsn, autocommit=True) as conn, pytest.raises(NotArmed):
            conn.execute(ACT)
        assert not arming.ensure_armed(server.dsn, tmp_path).already
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(ACT)
    finally:
        server.close()


def test_a_copy_of_an_armed_database_is_disarmed_and_cannot_use_the_witness_of_the_original(
    empty_database: Database, tmp_path: Path
) -> None:
    migrate.apply(empty_database.dsn, state=empty_database.state)
    name = f"fp_copy_{uuid4().hex[:8]}"
    source = str(conninfo_to_dict(empty_database.dsn)["dbname"])
    admin = make_conninfo(empty_database.dsn, dbname="postgres")
    copy = make_conninfo(empty_database.dsn, dbname=name)
    with psycopg.connect(admin, autocommit=True) as conn:
        copy_database(conn, source, name)
    try:
        with empty_database.connect(autocommit=True) as conn:
            conn.execute(ACT)  # the control: the original goes on, and has not even moved since

        with psycopg.connect(copy, autocommit=True) as conn, pytest.raises(NotArmed):
            conn.execute(ACT)
        with pytest.raises(WitnessMismatch) as caught:
            arming.ensure_armed(copy, empty_database.state)
        assert caught.value.field == "database"
    finally:
        with psycopg.connect(admin, autocommit=True) as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_a_stale_witness_is_refused_as_ahead(database: Database, tmp_path: Path) -> None:
    arming.clone_witness(database.state, tmp_path, database.dsn)
    with database.connect(autocommit=True) as conn:
        arming.beat(conn, FileWitness(database.state))

        with pytest.raises(WitnessMismatch) as caught:
            arming.beat(conn, FileWitness(tmp_path))
    assert caught.value.field == "ahead"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("installation", {"installation": uuid4()}),
        ("system_identifier", {"system_identifier": 1}),
        ("timeline", {"timeline": 77}),
        ("database", {"database_oid": 1}),
    ],
)
def test_each_part_of_the_witness_must_be_equal(database: Database, field: str, change: dict[str, Any]) -> None:
    witness = FileWitness(database.state)
    arming.arm(database.dsn, database.state)  # the control
    witness.write(replace(witness.read(), **change))

    with pytest.raises(WitnessMismatch) as caught:
        arming.arm(database.dsn, database.state)
    assert caught.value.field == field


def test_the_same_number_under_another_nonce_is_another_history(database: Database) -> None:
    witness = FileWitness(database.state)
    arming.arm(database.dsn, database.state)  # the control
    record = witness.read()
    witness.write(replace(record, head=Mark(record.head.seq, uuid4())))

    with pytest.raises(WitnessMismatch) as caught:
        arming.arm(database.dsn, database.state)
    assert caught.value.field == "nonce"


def test_a_turn_that_crashed_after_the_database_committed_is_found_again(database: Database) -> None:
    witness = FileWitness(database.state)
    before = witness.read()
    with database.connect(autocommit=True) as conn:
        arming.beat(conn, witness)
    after = witness.read()
    # Crash here: [W] the database took the turn, the witness still says "intended".
    witness.write(replace(before, intended=after.head))

    arming.arm(database.dsn, database.state)

    assert witness.read().head.seq == after.head.seq + 1
    assert witness.read().intended is None


def test_a_turn_that_crashed_before_the_database_committed_is_dropped(database: Database) -> None:
    witness = FileWitness(database.state)
    intend(witness, witness.read(), witness.read().head.following())

    armed = arming.arm(database.dsn, database.state)

    assert witness.read().head.seq == armed.seq


def test_arming_inside_a_subtransaction_is_refused(database: Database) -> None:
    witness = FileWitness(database.state)
    record = witness.read()
    mark = record.head.following()
    arguments = arming.parameters(record, mark) | {"sealed": False, "unseal": False}
    with database.connect() as conn, pytest.raises(WrongTransaction) as caught, conn.transaction(), conn.transaction():
        conn.execute(arming.ARM, arguments)
    assert caught.value.field == "subtransaction"
    with database.connect() as conn:
        conn.execute(arming.ARM, arguments)  # the control: as a transaction of its own
        assert conn.execute("SELECT fencepost.armed()").fetchone() == (True,)


def test_a_lost_and_a_damaged_witness_are_told_apart(database: Database) -> None:
    path = FileWitness(database.state).path
    kept = path.with_suffix(".kept")
    shutil.copyfile(path, kept)
    path.write_text('{"format": 1')

    with pytest.raises(Damaged):
        arming.arm(database.dsn, database.state)
    path.unlink()
    with pytest.raises(ConfigError) as caught:
        arming.arm(database.dsn, database.state)
    assert caught.value.field == "FENCEPOST_STATE"
    shutil.copyfile(kept, path)
    arming.arm(database.dsn, database.state)


def test_the_ticket_survives_vacuum_freeze(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("VACUUM (FREEZE) fencepost.ticket")
        conn.execute(ACT)


def test_a_ticket_written_again_by_a_restore_is_worth_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(ACT)
        conn.execute("CREATE TABLE public.kept AS SELECT * FROM fencepost.ticket")
        with conn.transaction():
            conn.execute("DELETE FROM fencepost.ticket")
            conn.execute("INSERT INTO fencepost.ticket SELECT * FROM public.kept")

        with pytest.raises(NotArmed):
            conn.execute(ACT)


def test_a_beat_that_the_server_commits_after_its_client_went_away_is_found_by_the_next_one(database: Database) -> None:
    witness = FileWitness(database.state)
    before = witness.read()
    mark = before.head.following()
    intend(witness, before, mark)
    # The keeper that comes next sends the same mark again, so that it does not matter which of the two commits.
    with database.connect(autocommit=True) as conn:
        arming.beat(conn, witness)
    assert witness.read().head == mark

    with database.connect(autocommit=True) as conn:
        arming.beat(conn, witness)  # the control
    assert witness.read().head.seq == mark.seq + 1


def test_a_witness_that_a_stopped_process_holds_is_not_waited_for_without_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witnesses, "HELD_SECONDS", 0.2)
    with FileWitness(database.state).held(), pytest.raises(Unreachable) as caught:
        arming.arm(database.dsn, database.state)
    assert caught.value.field == "FENCEPOST_STATE"
    arming.arm(database.dsn, database.state)  # the control


def test_a_beat_waits_for_a_lock_only_for_a_while(database: Database) -> None:
    witness = FileWitness(database.state)
    before = witness.read().head.seq
    # Our own deadline would end the wait too, but later, and it would leave the server's session waiting.
    with connect(database.dsn, autocommit=True, answer_within=12) as conn:
        with database.connect() as other:
            other.execute("SELECT FROM fencepost.tip FOR UPDATE")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                arming.beat(conn, witness)
        assert arming.beat(conn, witness) == before + 1  # the control


def test_looking_at_the_tip_compiles_nothing(database: Database) -> None:
    notices: list[str] = []
    with database.connect(autocommit=True) as conn:
        conn.add_notice_handler(lambda found: notices.append(found.message_primary or ""))
        conn.execute("LOAD 'auto_explain'")
        for setting, value in (
            ("auto_explain.log_min_duration", "0"),
            ("auto_explain.log_analyze", "on"),
            ("auto_explain.log_nested_statements", "on"),
            ("auto_explain.log_level", "notice"),
        ):
            conn.execute("SELECT set_config(%(setting)s, %(value)s, false)", {"setting": setting, "value": value})
        notices.clear()
        assert arming.read_tip(conn).armed
        assert any("pg_control_system" in text for text in notices)
        assert not any("JIT:" in text for text in notices)
        # The control, where the server can compile: everything that may be compiled is.
        if conn.execute("SELECT pg_jit_available()").fetchone() == (True,):
            conn.execute("SET jit = on")
            conn.execute("SET jit_above_cost = 0")
            conn.execute("SELECT count(*) FROM fencepost.tip")
            assert any("JIT:" in text for text in notices)
