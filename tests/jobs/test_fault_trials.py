"""Faults from outside: killed at every step of a job's life, clocks of the database that jump, a pooler in between."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from fencepost.jobs.claim import Job, claim
from fencepost.jobs.context import Context
from fencepost.jobs.effects import Success
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.renew import renew
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import StaleFence
from support.database import Database
from support.jobs import CLASS, Background, Conn, claimed, column, effect, expire, given, results, save, show
from support.processes import Child, wait_for
from support.provider import Client, Provider
from support.services import Services
from support.workers import CHILD_PATH, becomes, quick, running

KILLED = """
import os, signal, sys
from fencepost.jobs.effects import Success
from fencepost.jobs.worker import Worker
from support.jobs import CLASS, save
from support.provider import Client

worker, client, point = Worker(), Client(int(sys.argv[2])), sys.argv[3]

def here(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)

def call(request, dispatch):
    here("before the call")
    receipt = client.call(request, dispatch)
    here("after the answer")
    return receipt

@worker.job(CLASS, lease=60.0, max_effect_timeout=30.0, network_bound=0.0)
def handler(ctx, job):
    here("after the claim")
    done = ctx.effect("e1", call, {"operation": job.operation})
    here("after the record")

    def write(tx):
        save(tx, job.operation, by="killed")
        here("before the commit")

    ctx.publish(write)
    here("after the commit")

worker.run(sys.argv[1], concurrency=1)
"""
# Where it is killed, what is left then (job, effect, acceptances), and who publishes in the end.
POINTS = {
    "after the claim": ("running", None, 0, "successor"),
    "before the call": ("running", "pending", 0, "successor"),
    "after the answer": ("running", "pending", 1, "successor"),
    "after the record": ("running", "success", 1, "successor"),
    "before the commit": ("running", "success", 1, "successor"),
    "after the commit": ("done", "success", 1, "killed"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_any_step_loses_nothing_and_causes_nothing_twice(
    database18: Database, tmp_path: Path, point: str
) -> None:
    """SIGKILL, and a successor: one acceptance, one result, and what nobody knows waits for evidence."""
    job, state, accepted, by = POINTS[point]
    with Provider("answer") as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        given(conn)
        arguments = [database18.dsn, str(provider.port), point]
        with Child.script(KILLED, folder=tmp_path, arguments=arguments, **CHILD_PATH) as child:
            assert child.wait() == -signal.SIGKILL
        recorded = conn.execute("SELECT state FROM fencepost.effect").fetchone()
        left = (show(conn), None if recorded is None else recorded[0], len(provider.accepted))
        assert left == (job, state, accepted) and results(conn) == (["killed"] if job == "done" else [])

        if job == "running":
            assert claim(conn, "too early", [CLASS], 9) == []
            expire(conn)
            with running(_successor(client), database18):
                if state == "pending":
                    becomes(conn, "blocked")
                    assert effect(conn, "state") == "unknown"
                    _decide(
                        conn,
                        accepted=bool(accepted),
                        receipt=provider.receipt(provider.accepted[0]) if accepted else None,
                    )
                becomes(conn, "done")
        assert (results(conn), len(provider.accepted)) == ([by], 1)


def _successor(client: Client) -> Worker:
    worker = Worker()

    @worker.job(CLASS, **quick())
    def handler(ctx: Context, job: Job) -> None:
        ctx.effect("e1", client.call, {"operation": job.operation})
        ctx.publish(lambda tx: save(tx, job.operation, by="successor"))

    return worker


def _decide(conn: Conn, *, accepted: bool, receipt: str | None) -> None:
    """By the ledger; the process is known to have ended."""
    reconcile(
        conn,
        "t",
        "op-1",
        "e1",
        version=effect(conn, "version"),
        verdict="applied" if accepted else "not_applied",
        evidence_kind="termination_attested",
        evidence_ref="ledger",
        receipt=receipt,
        actor="ann",
        reason="it was killed",
    )


# Seen from the clock, everything on record is older or younger by the jump.
JUMP = """
UPDATE fencepost.job SET lease_until = lease_until - %(by)s * interval '1 s', run_at = run_at - %(by)s * interval '1 s';
UPDATE fencepost.agenda SET due = due - %(by)s * interval '1 s'"""


def jump(conn: Conn, seconds: int) -> None:
    for statement in JUMP.split(";"):
        conn.execute(statement.encode(), {"by": seconds})


def test_a_database_clock_that_jumps_ahead_ends_leases_and_gives_each_job_one_holder(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, lease=30.0)
        first = claimed(conn).fence
        renew(conn, first)
        jump(conn, 2 * 3600)
        with pytest.raises(StaleFence) as refused:
            renew(conn, first)
        assert refused.value.field == "lease"
        second = claimed(conn, owner="worker-b").fence
        with pytest.raises(StaleFence):
            publish(conn, first, lambda tx: save(tx, by="first"))
        publish(conn, second, lambda tx: save(tx, by="second"))
        assert results(conn) == ["second"]


def test_a_database_clock_that_jumps_back_delays_work_and_revives_no_authority(database18: Database) -> None:
    """The lease that had ended lies ahead again by the clock: its holder was superseded, and stays so."""
    with database18.connect(autocommit=True) as conn:
        given(conn, lease=30.0)
        first = claimed(conn).fence
        expire(conn)
        second = claimed(conn, owner="worker-b").fence
        given(conn, "later")
        jump(conn, -3600)
        with pytest.raises(StaleFence) as refused:
            renew(conn, first)
        assert refused.value.field == "generation"
        assert claim(conn, "worker-c", [CLASS], 9) == []
        renew(conn, second)
        publish(conn, second, lambda tx: save(tx, by="second"))
        jump(conn, 3600)
        assert [job.operation for job in claim(conn, "worker-c", [CLASS], 9)] == ["later"]
        assert results(conn) == ["second"]


OPEN = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND xact_start IS NOT NULL
  AND state LIKE 'idle in transaction%'"""


def test_no_transaction_stays_open_while_a_handler_computes_or_its_provider_is_silent(database18: Database) -> None:
    """The tables can be locked against everybody meanwhile, and sessions that idle in a transaction would be ended."""
    computing, go = threading.Event(), threading.Event()
    with Provider("hang") as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        worker = Worker()

        @worker.job(CLASS, **quick(lease=20.0, max_effect_timeout=20.0))
        def handler(ctx: Context, job: Job) -> None:
            computing.set()
            assert go.wait(20)
            receipt = ctx.effect("e1", client.call, {"operation": job.operation}, timeout=15.0)
            ctx.publish(lambda tx: save(tx, job.operation, by=receipt.receipt[:7]))

        given(conn)
        with running(worker, database18):
            assert computing.wait(20)
            _nobody_holds_anything(conn)
            go.set()
            wait_for(lambda: len(provider.accepted) == 1, 20, "the acceptance")
            _nobody_holds_anything(conn)
            provider.released.set()
            becomes(conn, "done")
        assert results(conn) == ["receipt"]


def _nobody_holds_anything(conn: Conn) -> None:
    wait_for(lambda: conn.execute(OPEN).fetchone() == (0,), 10, "no open transaction")
    with conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '5s'")
        conn.execute("LOCK TABLE fencepost.job, fencepost.effect IN ACCESS EXCLUSIVE MODE")


@pytest.mark.parametrize("size", [1, 4])
def test_workers_behind_a_transaction_pooler_publish_each_job_once(
    database18: Database, services: Services, size: int
) -> None:
    """One server connection for everything, and four for two workers and a stale one that races them."""
    through = Database(services.pgbouncer("18", pool_size=size).dsn(database18.dsn), database18.state)
    jobs = [f"op-{number}" for number in range(10)]
    with (
        database18.connect(autocommit=True) as conn,
        through.connect(autocommit=True, prepare_threshold=None) as client,
    ):
        for operation in jobs:
            given(conn, operation, lease=20.0, max_effect_timeout=5.0, network_bound=0.0)
        stale = claimed(client, "op-0").fence
        conn.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() WHERE exec = 'running'")
        with running(_with_effect(), through), running(_with_effect(), through):
            for operation in jobs:
                becomes(conn, "done", operation)
        late = Background(through, lambda own: publish(own, stale, lambda tx: save(tx, "op-0", by="stale")))
        with pytest.raises(StaleFence):
            late.outcome()
        assert [results(conn, operation) for operation in jobs] == [["a"]] * len(jobs)
        assert {column(conn, "applied_effects", operation) for operation in jobs} == {1}


def _with_effect() -> Worker:
    worker = Worker()

    @worker.job(CLASS, **quick())
    def handler(ctx: Context, job: Job) -> None:
        ctx.effect("e1", lambda request, dispatch: Success("r"), {"operation": job.operation})
        ctx.publish(lambda tx: save(tx, job.operation))

    return worker
