"""`fencepost dev app`: the whole chain in one process, which stops in order and tells what failed."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from fencepost.operate.dev import Part, run_all
from fencepost.schemas.errors import ConfigError, Unreachable
from support.command_line import CLI, Fencepost, environment
from support.database import Database
from support.processes import Child, wait_for
from support.services import Kafka

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def test_one_process_accepts_relays_handles_and_publishes_and_stops_in_order(
    database18: Database, kafka: Kafka, tmp_path: Path
) -> None:
    topic = kafka.topic()
    app = (QUICKSTART / "app.py").read_text()
    assert app.count('topics=["reports"]') == 1
    (tmp_path / "app.py").write_text(app.replace('topics=["reports"]', f'topics=["{topic}"]'))
    with database18.connect(autocommit=True) as conn:
        conn.execute((QUICKSTART / "schema.sql").read_bytes())
        routes = [{"match": "report.*", "to": topic}]
        destination = {"name": "reports", "kind": "kafka", "address": kafka.bootstrap, "routes": routes}
        env = environment(
            database18,
            {
                "FENCEPOST_DESTINATIONS": json.dumps([destination]),
                "FENCEPOST_RELAY_HEALTH_ADDRESS": "off",
                "KAFKA": kafka.bootstrap,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
            },
        )
        everything = [*CLI, "--verbose", "--log-format", "text", "dev", "app", "app:consumer", "app:worker"]
        with (
            Child(everything, output=tmp_path / "dev", env=env) as child,
            Child([str(tmp_path / "app.py"), "report-1"], output=tmp_path / "accept", env=env) as accepting,
        ):
            assert accepting.wait(60) == 0, accepting.text
            row = wait_for(lambda: conn.execute("SELECT body FROM reports").fetchone(), 150, "the report")
            assert row == ("summary of report-1",)
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(60) == 0, child.text
            ended = [line for line in child.text.splitlines() if "has ended" in line]
            for line, name in zip(ended, ("consumer app:consumer", "worker app:worker", "relay"), strict=True):
                assert f"{name} has ended" in line


def test_what_cannot_be_run_is_refused_by_name(
    database18: Database, empty_database: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "thing_to_run.py").write_text(
        "from fencepost.jobs.worker import Worker\nthing = 1\nworker = Worker()\n"
    )
    for target, words in (("thing_to_run:thing", "neither a handler nor a runner"), ("thing_to_run:none", "[target]")):
        done = fencepost(database18, "dev", "app", target)
        assert done.code == 2 and words in done.err.splitlines()[-1]
    done = fencepost(database18, "dev", "app", "thing_to_run:worker")
    assert done.code == 2 and "[classes]" in done.err.splitlines()[-1]
    done = fencepost(empty_database, "dev", "app", "thing_to_run:worker")
    assert done.code == 2 and "fencepost migrate" in done.err.splitlines()[-1]


def test_when_one_fails_the_others_drain_in_order_and_its_error_comes_out() -> None:
    ended: list[str] = []

    def part(name: str) -> Part:
        stop = threading.Event()

        def run() -> None:
            assert stop.wait(60)
            ended.append(name)

        return Part(name, run, stop.set, 60.0)

    def failing() -> None:
        raise Unreachable("nobody answers", field="database")

    with pytest.raises(Unreachable):
        run_all([part("relay"), part("worker"), Part("failing", failing, lambda: None, 60.0), part("consumer")])
    assert ended == ["consumer", "worker", "relay"]
    with pytest.raises(ConfigError):
        run_all([])
