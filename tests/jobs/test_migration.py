"""Work that waits in another queue of the same database is moved in one commit: each job is in exactly one queue."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import procrastinate
import pytest

from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import Conn

CLASSES = {"send_mail": "mail.send"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "examples" / "migration"), *sys.path])


def move(conn: Conn, tenant: str, classes: dict[str, str]) -> int:
    return int(importlib.import_module("from_procrastinate").move(conn, tenant, classes))


def deferred(database: Database, *args: dict[str, Any], **how: Any) -> None:
    """Jobs in the other queue, put there by its own library."""
    with database.connect(autocommit=True) as conn:
        conn.execute("DROP SCHEMA public CASCADE")
        conn.execute("CREATE SCHEMA public")
    app: Any = procrastinate.App(
        connector=procrastinate.SyncPsycopgConnector(conninfo=database.dsn, max_size=1, min_size=1)
    )
    with app.open():
        app.schema_manager.apply_schema()
        for each in args:
            app.configure_task("send_mail", **how).defer(**each)
        app.configure_task("another").defer()


def left(conn: Conn) -> list[Any]:
    return conn.execute("SELECT task_name, status::text FROM procrastinate_jobs ORDER BY id").fetchall()


def test_waiting_jobs_move_with_priority_and_time_and_a_rollback_moves_nothing(database18: Database) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    deferred(database18, {"to": "a"}, {"to": "b"}, priority=7, schedule_at=later)
    with database18.connect() as conn:
        register_class(conn, JobClassPolicy(as_class("mail.send")))
        conn.commit()
        assert move(conn, "acme", CLASSES) == 2
        conn.rollback()
        assert len(left(conn)) == 3 and conn.execute("SELECT count(*) FROM fencepost.job").fetchone() == (0,)
        assert move(conn, "acme", CLASSES) == 2
        conn.commit()
        assert left(conn) == [("another", "todo")]
        found = conn.execute("SELECT class, priority, run_at, convert_from(args, 'UTF8') FROM fencepost.job").fetchall()
        assert sorted(found) == [("mail.send", 7, later, '{"to":"a"}'), ("mail.send", 7, later, '{"to":"b"}')]
        assert move(conn, "acme", CLASSES) == 0


def test_what_a_worker_has_taken_stays_there(database18: Database) -> None:
    deferred(database18, {"to": "a"}, {"to": "b"})
    with database18.connect() as conn, database18.connect() as worker:
        register_class(conn, JobClassPolicy(as_class("mail.send")))
        conn.commit()
        worker.execute("SELECT FROM procrastinate_jobs WHERE id = 1 FOR UPDATE")
        assert move(conn, "acme", CLASSES) == 1
        conn.commit()
        assert [job.operation for job in claim(conn, owner="w", classes=["mail.send"], limit=5)] == ["procrastinate-2"]


def test_args_that_jobs_do_not_carry_move_nothing(database18: Database) -> None:
    deferred(database18, {"to": "a"}, {"share": 0.5})
    with database18.connect() as conn:
        register_class(conn, JobClassPolicy(as_class("mail.send")))
        conn.commit()
        with pytest.raises(InvalidInput, match="share") as refused:
            move(conn, "acme", CLASSES)
        assert refused.value.field is not None
        conn.rollback()
        assert len(left(conn)) == 3
