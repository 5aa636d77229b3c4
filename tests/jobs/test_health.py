"""What a worker says of itself: ready only while it can work, alive while its loop moves, and counts that are right."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.health import serving
from fencepost.jobs.standing import ENDINGS, Standing
from fencepost.jobs.worker import Poison, Retry, Worker
from fencepost.schemas import arming
from fencepost.schemas.health import HealthAddress, HealthServer
from stack.places import free_port
from support.command_line import running as command
from support.database import Database
from support.health import LOOPBACK, ask
from support.jobs import CLASS, given, save
from support.processes import wait_for
from support.proxy import Proxy
from support.workers import QUICK, Running, becomes, running

HERE = HealthAddress(LOOPBACK, 0)
DEADLINE_SECONDS = 30.0


def idle(ctx: Context, job: Job) -> None: ...


@contextmanager
def quick(worker: Worker, dsn: str, proxy: Proxy) -> Generator[None]:
    """The worker at work through the proxy."""
    run = Running(worker, make_conninfo(dsn, port=proxy.port), patience=120.0)
    try:
        yield
    finally:
        run.stop()


@contextmanager
def served(worker: Worker) -> Generator[HealthServer]:
    with serving(worker.standing, HERE) as server:
        yield server


def told(server: HealthServer, state: str, **more: object) -> Any:
    """The document of `/readyz` once it tells this state, and that."""
    expected = {"state": state} | more

    def now() -> Any:
        document = ask(server.port, "/readyz").document
        return document if {name: document.get(name) for name in expected} == expected else None

    return wait_for(now, DEADLINE_SECONDS, f"the document to tell {expected}")


def metric(server: HealthServer, name: str) -> float | None:
    for line in ask(server.port, "/metrics").text.splitlines():
        if line.rpartition(" ")[0] == f"fencepost_worker_{name}":
            return float(line.rpartition(" ")[2])
    return None


def test_a_worker_is_ready_while_it_can_work_and_counts_how_its_handlers_ended(database18: Database) -> None:
    worker = Worker()
    hold, held = threading.Event(), threading.Event()

    @worker.job(CLASS, max_attempts=2, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        match job.operation:
            case "publishes":
                ctx.publish(lambda tx: save(tx, job.operation))
            case "raises":
                raise ValueError("secret")
            case "poison":
                raise Poison("unusable")
            case "retries" if job.attempts == 1:
                raise Retry("later", after=0.01)
            case "held":
                held.set()
                assert hold.wait(DEADLINE_SECONDS)
            case _:
                pass

    with served(worker) as server, database18.connect(autocommit=True) as conn:
        assert told(server, "starting") and ask(server.port, "/readyz").status == 503
        operations = ("returns", "publishes", "raises", "poison", "retries", "held")
        for operation in operations:
            given(conn, operation, max_attempts=2, backoff_base=0.0, backoff_max=0.0)
        with running(worker, database18, concurrency=8):
            assert held.wait(DEADLINE_SECONDS)
            for operation, state in (
                ("returns", "done"),
                ("publishes", "done"),
                ("raises", "poison"),
                ("poison", "poison"),
            ):
                becomes(conn, state, operation)
            becomes(conn, "done", "retries")
            document = told(server, "ready", running=1)
            assert ask(server.port, "/readyz").status == 200 and ask(server.port, "/livez").status == 200
            assert (document["running"], document["capacity"]) == (1, 8) and document["oldest_running_seconds"] > 0
            found = {how: metric(server, f'ended_total{{class="{CLASS}",ending="{how}"}}') for how in ENDINGS}
            hold.set()
            becomes(conn, "done", "held")
        assert {how: count for how, count in found.items() if count} == {
            "returned": 2.0,
            "published": 1.0,
            "raised": 2.0,
            "poison": 1.0,
            "retry": 1.0,
        }
        assert metric(server, f'claimed_total{{class="{CLASS}"}}') == 8.0
        assert told(server, "draining")
        assert "secret" not in ask(server.port, "/metrics").text


def test_a_disarmed_database_and_one_that_does_not_answer_are_told_apart(database18: Database) -> None:
    worker = Worker()
    worker.job(CLASS, **QUICK)(idle)
    info = conninfo_to_dict(database18.dsn)
    with (
        served(worker) as server,
        Proxy(int(str(info["port"])), str(info["host"])) as proxy,
        database18.connect(autocommit=True) as conn,
        quick(worker, database18.dsn, proxy),
    ):
        told(server, "ready")
        conn.execute("DELETE FROM fencepost.ticket")
        told(server, "disarmed")
        arming.ensure_armed(database18.dsn, database18.state)
        told(server, "ready")
        proxy.cut(refuse_new=True)
        told(server, "database")
        assert ask(server.port, "/livez").status == 200
        proxy.heal()
        told(server, "ready")


def test_a_loop_that_stands_still_is_not_alive() -> None:
    standing = Standing("w")
    assert standing.moving(60.0)
    standing.moved_at -= 61.0
    assert not standing.moving(60.0)


MODULE = """
from fencepost.jobs.worker import Worker

worker = Worker()

@worker.job("report.analyse")
def handler(ctx, job): ...
"""


def test_the_command_serves_health_where_the_settings_say_and_refuses_an_open_address(
    database18: Database, tmp_path: Path
) -> None:
    (tmp_path / "served.py").write_text(MODULE)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    port = free_port()
    here = {"PYTHONPATH": path, "FENCEPOST_WORKER_HEALTH_ADDRESS": f"127.0.0.1:{port}"}
    with command(database18, "worker", "run", "served:worker", folder=tmp_path, **here) as child:
        child.says("health is served")
        wait_for(lambda: ask(port, "/readyz").status == 200, DEADLINE_SECONDS, "the worker to be ready")
        assert "fencepost_worker_ready 1.0" in ask(port, "/metrics").text
    there = here | {"FENCEPOST_WORKER_HEALTH_ADDRESS": "0.0.0.0:80"}
    with command(database18, "worker", "run", "served:worker", folder=tmp_path, **there) as child:
        assert child.wait(DEADLINE_SECONDS) == 2
        child.says("worker.health_address")
