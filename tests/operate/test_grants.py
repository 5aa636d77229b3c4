"""`fencepost grants`: told, set right, told again; and each wing does its whole work by a login of its own role only."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Outcome
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.worker import Worker
from fencepost.relay import outbox
from fencepost.schemas import grants
from support.command_line import Fencepost
from support.database import Database, Databases
from support.deliveries import Submitted, from_kafka
from support.deliveries import envelope as made
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import destination, relay_once
from support.roles import Roles, separated
from support.workers import QUICK, Running


@pytest.fixture(scope="module")
def roles(databases18: Databases) -> Iterator[Roles]:
    with separated(databases18) as found:
        yield found


def test_verify_is_silent_about_an_installation_that_is_right_and_tells_each_difference(
    roles: Roles, fencepost: Fencepost
) -> None:
    done = fencepost(roles.database, "grants", "verify")
    assert done.code == 0 and "0 differences" in done.out
    projector = roles.role("projector")
    with roles.database.connect(autocommit=True) as conn:
        conn.execute(f"GRANT EXECUTE ON FUNCTION fencepost.submit TO {projector}".encode())
        conn.execute(f"REVOKE SELECT ON fencepost.status FROM {roles.role('reader')}".encode())

    told = fencepost(roles.database, "grants", "verify")
    assert told.code == 1
    assert f"{projector} has EXECUTE on submit" in told.out
    assert f"{roles.role('reader')} lacks SELECT on status" in told.out
    assert len(json.loads(fencepost(roles.database, "grants", "verify", "--json").out)) == 2
    doctor = fencepost(roles.database, "doctor")
    assert doctor.code == 1 and f"{projector} has EXECUTE on submit" in doctor.out

    planned = fencepost(roles.database, "grants", "apply", "--dry-run")
    assert planned.code == 0 and 'GRANT EXECUTE ON FUNCTION "fencepost"."submit" TO' in planned.out
    assert fencepost(roles.database, "grants", "verify").code == 1, "a dry run changes nothing"

    for _ in range(2):
        assert fencepost(roles.database, "grants", "apply").code == 0
        assert fencepost(roles.database, "grants", "verify").code == 0
    assert fencepost(roles.database, "doctor").code == 0


def test_a_reader_may_verify_and_nobody_but_the_owner_may_apply(roles: Roles, fencepost: Fencepost) -> None:
    reader = roles.login("reader")
    assert fencepost(reader, "grants", "verify").code == 0
    assert fencepost(reader, "grants", "apply").code == 1
    assert fencepost(roles.login("migrator"), "grants", "apply").code == 0
    assert fencepost(reader, "grants", "verify").code == 0


def test_an_installation_without_roles_gets_them_without_losing_its_arming(
    databases18: Databases, fencepost: Fencepost
) -> None:
    database = databases18.empty()
    install = f"t{uuid.uuid4().hex[:8]}"
    assert fencepost(database, "migrate", "--single-role", "--install", install).code == 0
    try:
        for command in ("verify", "apply"):
            refused = fencepost(database, "grants", command)
            assert refused.code == 2 and "--separate-roles" in refused.line
        planned = fencepost(database, "grants", "apply", "--separate-roles", "--dry-run").out
        assert f'CREATE ROLE "fencepost_{install}_projector" NOLOGIN;' in planned
        assert fencepost(database, "grants", "verify").code == 2

        assert fencepost(database, "grants", "apply", "--separate-roles").code == 0
        assert fencepost(database, "grants", "verify").code == 0
        doctor = fencepost(database, "doctor")
        assert doctor.code == 0 and "separated" in doctor.out
        assert fencepost(database, "migrate").code == 0
        assert fencepost(database, "grants", "verify").code == 0
    finally:
        databases18.drop(database)
        with psycopg.connect(roles_server(databases18), autocommit=True) as conn:
            for name in ("owner", *grants.ROLES):
                conn.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(grants.role(install, name))))


def roles_server(databases: Databases) -> str:
    spare = databases.empty()
    databases.drop(spare)
    return make_conninfo(spare.dsn, dbname="postgres")


# Each wing, by its own login.


def test_every_wing_does_its_work_under_its_own_role(roles: Roles, fencepost: Fencepost) -> None:
    with roles.database.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE handled (operation text PRIMARY KEY); GRANT INSERT ON handled TO PUBLIC")

    producer = roles.login("producer")
    with producer.connect() as conn, conn.transaction():
        outbox.enqueue(conn, Submitted(tenant="acme", operation="op-1", document="a"))

    broker = MemoryBroker()
    relay_once(roles.login("relay"), destination(broker))
    assert broker.operations() == ["op-1"]

    @inbox(consumer="reports")
    def on_submitted(tx: Connection[Any], event: Submitted) -> None:
        tx.execute("INSERT INTO handled VALUES (%s)", (event.operation,))
        handoff.submit(tx, "report.analyse", event)

    delivery = from_kafka(made(operation="op-1"))
    assert on_submitted.handle(roles.login("consumer").dsn, delivery).outcome is Outcome.HANDLED

    worker = Worker()
    executor = roles.login("executor")

    @worker.job("report.analyse", **QUICK)
    def analyse(ctx: Context, job: Job) -> None:
        ctx.publish(lambda tx: tx.execute("INSERT INTO handled VALUES (%s)", (f"{job.operation} done",)))

    running = Running(worker, executor.dsn)
    with roles.database.connect(autocommit=True) as conn:
        done = "SELECT true FROM fencepost.job WHERE operation = 'op-1' AND exec = 'done'"
        wait_for(lambda: conn.execute(done.encode()).fetchone(), 20, "the job to be done")
        running.stop()
        assert conn.execute("SELECT operation FROM handled ORDER BY 1").fetchall() == [("op-1",), ("op-1 done",)]

    reader = roles.login("reader")
    status = fencepost(reader, "status")
    assert status.code == 0 and "report.analyse" in status.out
    assert fencepost(reader, "doctor").code == 0
    for other in (producer, executor, reader):
        with other.connect(autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT * FROM fencepost.tick(interval '0')")


def test_the_repairing_roles_repair_and_execute_nothing(roles: Roles, fencepost: Fencepost) -> None:
    with roles.login("executor").connect(autocommit=True) as conn:
        conn.execute("SELECT fencepost.register_class('r.c', 'strict', '9 s', 5, 5, '1 s', '5 s', '9 s', '9 s')")
        conn.execute("SELECT fencepost.submit('t', 'op-9', 'r.c', '\\x7b7d', 'ref:x')")
    reconciler: Database = roles.login("reconciler")
    listed = fencepost(reconciler, "jobs", "list")
    assert listed.code == 0 and "op-9" in listed.out
    cancelled = fencepost(
        reconciler,
        "jobs",
        "cancel",
        "--tenant",
        "t",
        "--operation",
        "op-9",
        "--class",
        "r.c",
        "--actor",
        "ann",
        "--reason-text",
        "a test",
    )
    assert cancelled.code == 0, cancelled.err
    which = ("--tenant", "t", "--operation", "op-9", "--class", "r.c")
    for act in (("show",), ("retry", "--reason-text", "a test", "--actor", "ann"), ("schedules", "list")):
        done = fencepost(reconciler, "jobs", *act, *(() if "list" in act else which))
        assert done.code == 0, done.err
    with reconciler.connect(autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT fencepost.claim('w', '{r.c}', 1)")
    with roles.login("maintenance").connect(autocommit=True) as conn:
        conn.execute("SELECT outcome FROM fencepost.recycle_outbox(interval '1 hour')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT fencepost.requeue('t', 'op-9', 'r.c', 'ann', 'why')")
    with roles.login("authority_admin").connect(autocommit=True) as conn:
        conn.execute("SELECT fencepost.set_retention('8 days', '9 days', 'ann', 'a test')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT fencepost.claim('w', '{r.c}', 1)")
