"""`fencepost worker run`, `fencepost consumer run`, and the entry itself: what they run, and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.jobs.submit import submit
from support.command_line import Fencepost, running
from support.database import Database
from support.processes import wait_for

WORKER = """
from fencepost.jobs.worker import Worker

worker = Worker(owner="here")
other = object()

@worker.job("report.make", lease=10)
def make(ctx, job):
    print("making", job.operation, flush=True)
"""
CONSUMER = """
class Runner:
    def __init__(self, dsn):
        self.dsn = dsn

    def run(self, stop=None):
        print("consuming", flush=True)
        stop.wait(30)

consumer = Runner("none")
make = Runner
other = object()
"""


def test_worker_runs_its_jobs_and_drains_on_sigterm(database: Database, tmp_path: Path) -> None:
    (tmp_path / "some_worker.py").write_text(WORKER)
    with running(database, "worker", "run", "some_worker:worker", folder=tmp_path, PYTHONPATH=str(tmp_path)) as worker:
        worker.says("worker here runs report.make")
        with database.connect() as conn:
            submit(conn, "report.make", tenant="acme", operation="op", args={})

        def done() -> bool:
            with database.connect(autocommit=True) as conn:
                row = conn.execute("SELECT count(*) FROM fencepost.job WHERE exec = 'done'").fetchone()
            return row is not None and row[0] == 1

        wait_for(done, 20, "the job to be done")
        assert worker.text.count("making op") == 1
        assert worker.terminate() == 0


def test_worker_gives_up_on_a_silent_database_with_its_address(
    database18: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "lonely_worker.py").write_text(WORKER)

    done = fencepost(
        None,
        "worker",
        "run",
        "lonely_worker:worker",
        "--patience",
        "0.5",
        FENCEPOST_DATABASE="postgresql://app:hunter2@127.0.0.1:1/app",
        FENCEPOST_STATE=str(database18.state),
    )

    assert done.code == 3
    assert "127.0.0.1:1/app" in done.err.splitlines()[-1]


@pytest.mark.parametrize("name", ["consumer", "make"])
def test_consumer_runs_a_runner_or_what_makes_one(database18: Database, tmp_path: Path, name: str) -> None:
    (tmp_path / "some_consumer.py").write_text(CONSUMER)
    target = f"some_consumer:{name}"
    with running(database18, "consumer", "run", target, folder=tmp_path, PYTHONPATH=str(tmp_path)) as consumer:
        consumer.says("consuming")
        assert consumer.terminate() == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_colon", "does not name a worker"),
        ("no_such_module_here:worker", "cannot be imported"),
        ("bad_worker:nothing", "bad_worker has no nothing"),
        ("bad_worker:other", "is not a worker"),
        ("broken_worker:worker", "raised ZeroDivisionError"),
        ("unreadable_worker:worker", "cannot be imported"),
    ],
)
def test_target_that_is_no_worker_is_refused_in_one_line(
    database18: Database, fencepost: Fencepost, tmp_path: Path, target: str, words: str
) -> None:
    (tmp_path / "bad_worker.py").write_text(WORKER)
    (tmp_path / "broken_worker.py").write_text("1 / 0\n")
    (tmp_path / "unreadable_worker.py").write_text("def\n")

    done = fencepost(database18, "worker", "run", target)

    assert done.code == 2
    assert words in done.line and "[target]" in done.line


def test_target_that_is_no_consumer_is_refused(database18: Database, fencepost: Fencepost, tmp_path: Path) -> None:
    (tmp_path / "odd_consumer.py").write_text(CONSUMER)

    done = fencepost(database18, "consumer", "run", "odd_consumer:other")

    assert done.code == 2
    assert "neither a runner nor a function" in done.line


@pytest.mark.parametrize("library", ["typer", "rich", "pydantic_settings", "tenacity"])
def test_without_the_extra_one_line_says_what_to_install(library: str) -> None:
    source = (
        "import sys; {hidden}; from fencepost.operate.cli import main; sys.argv = ['fencepost', '--version']; main()"
    )
    control = subprocess.run(
        [sys.executable, "-c", source.format(hidden="pass")], capture_output=True, text=True, timeout=30, check=False
    )
    assert control.returncode == 0 and control.stdout.startswith("fencepost ")

    hidden = source.format(hidden=f"sys.modules[{library!r}] = None")
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 2
    assert done.stderr == f"fencepost: the command line needs {library}; pip install 'fencepost[cli]'\n"


def test_every_command_on_an_empty_database_says_what_to_run(
    empty_database: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "early_worker.py").write_text(WORKER)
    which = ("--tenant", "t", "--operation", "o")
    destinations = '[{"name": "d", "kind": "kafka", "address": "127.0.0.1:1", "routes": [{"match": "*", "to": "t"}]}]'
    for arguments in (
        ("status",),
        ("effects", "list"),
        ("effects", "show", *which, "--effect", "e"),
        ("jobs", "list"),
        ("jobs", "cancel", *which, "--class", "c", "--reason", "r"),
        ("relay", "run", "--once"),
        ("relay", "run"),
        ("worker", "run", "early_worker:worker"),
    ):
        done = fencepost(empty_database, *arguments, FENCEPOST_DESTINATIONS=destinations)
        assert done.code == 1, arguments
        assert "run `fencepost migrate`" in done.err.splitlines()[-1], arguments
