"""Real processes, killed and stopped: attempts are used up, a paused worker cannot publish, stopping loses nothing."""

import os
import signal
from pathlib import Path

from fencepost.jobs.cancel import requeue
from fencepost.jobs.worker import Worker
from support.database import Database
from support.jobs import CLASS, column, given, results, show
from support.processes import Child, wait_for
from support.workers import CHILD_PATH, becomes, publishing, running

SUICIDAL = """
import os, signal, sys
from fencepost.jobs.worker import Backoff, Worker
from support.jobs import CLASS, save

worker = Worker()

@worker.job(CLASS, lease=0.4, max_attempts=3, backoff=Backoff(0.0, 0.0))
def handler(ctx, job):
    if job.operation == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.publish(lambda tx: save(tx, job.operation))

worker.run(sys.argv[1], concurrency=1)
"""


def test_a_job_that_kills_its_worker_is_claimed_three_times_then_poison(database18: Database, tmp_path: Path) -> None:
    """B06. Crash here: [C] [H]: the attempt counted at the claim."""
    with database18.connect(autocommit=True) as conn:
        given(conn, "deadly", lease=0.4, max_attempts=3)
        given(conn, "normal", lease=0.4, max_attempts=3)
        for _ in range(3):
            with Child.script(SUICIDAL, folder=tmp_path, arguments=[database18.dsn], **CHILD_PATH) as child:
                assert child.wait() == -signal.SIGKILL
        with Child.script(SUICIDAL, folder=tmp_path, arguments=[database18.dsn], **CHILD_PATH) as child:
            becomes(conn, "poison", "deadly")
            becomes(conn, "done", "normal")
            assert child.terminate() == 0
        claims = conn.execute("SELECT count(*) FROM fencepost.attempt WHERE operation = 'deadly'").fetchone()
        assert claims == (3,) and column(conn, "reason", "deadly") == "attempts_exhausted"

        requeue(conn, "t", "deadly", CLASS, actor="ann", reason="handler fixed")
        with running(publishing(Worker(), max_attempts=3), database18):
            becomes(conn, "done", "deadly")
        assert column(conn, "attempts", "deadly") == 1 and results(conn, "deadly") == ["a"]


PAUSED = """
import logging, sys, time
from pathlib import Path
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import LeaseLost, StaleFence
from support.jobs import CLASS, save

logging.basicConfig(level=logging.INFO)
worker = Worker(owner="same-name")

@worker.job(CLASS, lease=1.0)
def handler(ctx, job):
    print("computing", flush=True)
    until = time.monotonic() + 20
    while not Path(sys.argv[2]).exists() and time.monotonic() < until:
        time.sleep(0.01)
    result = {"words": 3.5}

    def publish():
        ctx.publish(lambda tx: save(tx, job.operation, by="paused"))

    try:
        try:
            publish()
        except LeaseLost:
            # Broken off by the limit of a lease that is over, before the fence was asked.
            publish()
    except StaleFence as error:
        print("refused", error.field, ctx.stage(result), flush=True)
        raise

worker.run(sys.argv[1], concurrency=1)
"""


def test_a_worker_paused_past_its_lease_finishes_but_cannot_publish_and_its_successor_can(
    database18: Database, tmp_path: Path
) -> None:
    """G8, end to end: SIGSTOP past the lease, a successor publishes, SIGCONT: refused, and the computation staged."""
    go = tmp_path / "go"
    successor = publishing(Worker(owner="same-name"), by="successor")
    with database18.connect(autocommit=True) as conn:
        given(conn, lease=1.0)
        with Child.script(PAUSED, folder=tmp_path, arguments=[database18.dsn, str(go)], **CHILD_PATH) as child:
            child.says("computing")
            child.pause()
            expired = "SELECT lease_until < clock_timestamp() FROM fencepost.job"
            wait_for(lambda: conn.execute(expired).fetchone() == (True,), 10, "the lease to end")
            with running(successor, database18):
                becomes(conn, "done")
            go.touch()
            child.resume()
            child.says("refused state True")
            child.says("refused as no longer current")
            assert child.terminate() == 0
            assert "lost authority" in child.text
        assert results(conn) == ["successor"] and column(conn, "attempts") == 2
        staged = conn.execute(
            "SELECT s.result, a.generation FROM fencepost.staged AS s JOIN fencepost.attempt AS a USING (tenant, attempt)"
        ).fetchall()
        assert staged == [(b'{"words":3.5}', 1)]


SLEEPING = """
import asyncio, sys, time
from fencepost.jobs.worker import Worker
from support.jobs import CLASS

worker = Worker()

def slow(ctx, job):
    print("handling", flush=True)
    time.sleep(60)

async def slow_async(ctx, job):
    print("handling", flush=True)
    await asyncio.sleep(60)

worker.job(CLASS, lease=60.0)(slow if sys.argv[2] == "sync" else slow_async)
worker.run(sys.argv[1], concurrency=1, drain=0.5)
print("returned", flush=True)
"""


def test_two_signals_in_a_row_still_give_the_claim_back_and_the_process_ends_in_time(
    database18: Database, tmp_path: Path
) -> None:
    """B02."""
    with database18.connect(autocommit=True) as conn:
        for kind in ("sync", "async"):
            given(conn, kind)
            with Child.script(SLEEPING, folder=tmp_path, arguments=[database18.dsn, kind], **CHILD_PATH) as child:
                child.says("handling")
                assert show(conn, kind) == "running"
                os.kill(child.pid, signal.SIGTERM)
                assert child.terminate(within=10) == 0
                child.says("returned")
            assert (show(conn, kind), column(conn, "attempts", kind)) == ("queued", 0)
            conn.execute("UPDATE fencepost.job SET run_at = run_at + interval '1 h' WHERE operation = %s", (kind,))
