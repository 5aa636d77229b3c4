"""A computation runs in a process of its own: it may die, be late or be killed, and takes nothing with it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from fencepost.jobs.claim import Job
from fencepost.jobs.compute import Computers
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import ComputationDied, ConfigError, InvalidInput
from support import computing
from support.database import Database
from support.jobs import CLASS, column, expire, given
from support.processes import wait_for
from support.workers import QUICK, becomes, quick, running


@pytest.fixture
def computers() -> Generator[Computers]:
    made = Computers(1)
    yield made
    made.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_results_and_errors_come_back_from_one_process_that_is_used_again(computers: Computers) -> None:
    first, process = computers.run(computing.square, (7,), 30.0)
    assert first == 49 and process != os.getpid()
    with pytest.raises(ValueError, match="no"):
        computers.run(computing.refuse, ("no",), 30.0)
    assert computers.run(computing.square, (2,), 30.0) == (4, process)


def test_what_cannot_be_sent_is_told_by_its_type_and_the_process_lives_on(computers: Computers) -> None:
    process = computers.run(computing.square, (1,), 30.0)[1]
    with pytest.raises(InvalidInput) as refused:
        computers.run(lambda: 1, (), 30.0)
    assert refused.value.field == "function"
    for function, what in ((computing.lock, "result"), (computing.unfit, "Unfit")):
        with pytest.raises(InvalidInput, match=what) as refused:
            computers.run(function, (), 30.0)
        assert refused.value.field == "result" and "secret" not in str(refused.value)
    assert computers.run(computing.square, (1,), 30.0)[1] == process


def test_a_crash_and_a_late_result_cost_one_process_and_no_more(computers: Computers, tmp_path: Path) -> None:
    process = computers.run(computing.square, (1,), 30.0)[1]
    with pytest.raises(ComputationDied, match=f"code -{signal.SIGSEGV:d}"):
        computers.run(computing.die, (), 30.0)
    second = computers.run(computing.square, (1,), 30.0)[1]
    assert gone(process) and second != process
    with pytest.raises(ComputationDied) as refused:
        computers.run(computing.told, (str(tmp_path / "pid"),), 0.5)
    assert refused.value.field == "timeout"
    wait_for(lambda: gone(second), 10.0, "the late process to end")
    assert computers.run(computing.square, (3,), 30.0)[0] == 9


def test_closing_kills_what_runs_and_refuses_who_waits(tmp_path: Path) -> None:
    computers = Computers(1)
    died: list[ComputationDied] = []

    def run() -> None:
        try:
            computers.run(computing.told, (str(tmp_path / "pid"),), None)
        except ComputationDied as error:
            died.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for((tmp_path / "pid").exists, 30.0, "the computation to run")
    computers.close()
    for thread in threads:
        thread.join(10.0)
    assert len(died) == 2
    wait_for(lambda: gone(int((tmp_path / "pid").read_text())), 10.0, "its process to end")


def test_who_gives_up_before_a_process_is_free_leaves_without_one(computers: Computers, tmp_path: Path) -> None:
    first = threading.Thread(target=lambda: computers.run(computing.told, (str(tmp_path / "pid"), 5.0), None))
    first.start()
    wait_for((tmp_path / "pid").exists, 30.0, "the only process to be in use")
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(ComputationDied, match="nobody waits"):
        computers.run(computing.told, (str(tmp_path / "second"), 0.0), None, given_up)
    assert first.is_alive() and not (tmp_path / "second").exists()
    first.join(30.0)
    assert computers.run(computing.square, (2,), 30.0)[0] == 4


def test_handlers_compute_elsewhere_and_a_lost_lease_kills_only_what_nobody_waits_for(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    found: list[int] = []

    @worker.job("a.sync", **QUICK)
    def sync(ctx: Context, job: Job) -> None:
        found.append(ctx.compute(computing.square, 5)[0])

    @worker.job("an.async", **quick(lease=6.0))
    async def asynchronous(ctx: AsyncContext, job: Job) -> None:
        found.append((await ctx.compute(computing.square, 6))[0])
        if job.attempts == 1:
            await ctx.compute(computing.told, str(tmp_path / "pid"))

    with database18.connect(autocommit=True) as conn:
        for name in worker.classes:
            given(conn, name, job_class=name)
        with running(worker, database18, processes=2):
            becomes(conn, "done", "a.sync", job_class="a.sync")
            wait_for((tmp_path / "pid").exists, 30.0, "the computation to run")
            expire(conn, "an.async")
            wait_for(lambda: gone(int((tmp_path / "pid").read_text())), 30.0, "the computation to be killed")
            becomes(conn, "done", "an.async", job_class="an.async")
    assert sorted(found) == [25, 36, 36]
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_computation_that_dies_fails_its_attempt_and_not_the_worker(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, max_attempts=1, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        ctx.compute(computing.die) if job.operation == "dies" else ctx.compute(computing.square, 1)

    with database18.connect(autocommit=True) as conn:
        for operation in ("dies", "lives"):
            given(conn, operation, max_attempts=1)
        with running(worker, database18):
            becomes(conn, "poison", "dies")
            becomes(conn, "done", "lives")
        assert column(conn, "detail", "dies") == "handler_raised: ComputationDied"


def idle(ctx: Context, job: Job) -> None: ...


def test_no_process_is_refused_by_name(database18: Database) -> None:
    worker = Worker()
    worker.job(CLASS)(idle)
    with pytest.raises(ConfigError) as refused:
        worker.run(database18.dsn, processes=0)
    assert refused.value.field == "processes"
