"""`fencepost worker run`, `fencepost consumer run`, and the entry itself: what they run, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.jobs.submit import submit
from fencepost.schemas.envelope import Envelope
from stack.places import free_port
from support.brokers import declare, left, produce, publish
from support.command_line import Fencepost, running
from support.database import Database
from support.deliveries import Submitted, envelope
from support.health import ask
from support.processes import Child, wait_for
from support.services import Pooler, Services

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


HANDLER = """
import time
from fencepost.consumer.inbox import inbox
from support.deliveries import Submitted

@inbox(consumer="reports")
def on_submitted(tx, event: Submitted):
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
    if event.operation == "slow":
        print("inside", flush=True)
        time.sleep(60)
    if event.operation == "poison":
        raise ValueError(event.document)
"""
TOML = """
[consumer]
kind = "{kind}"
address = {{ file = "broker" }}
{more}
health_address = "127.0.0.1:{port}"
max_attempts = 1
"""


def consuming(database: Database, folder: Path, kind: str, address: str, more: str, port: int) -> Child:
    """`fencepost consumer run` of a handler whose broker is in a file, and the broker's address in a secret file."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS done (operation text)")
    (folder / "handlers.py").write_text(HANDLER)
    (folder / "fencepost.toml").write_text(TOML.format(kind=kind, more=more, port=port))
    (folder / "secrets").mkdir()
    (folder / "secrets" / "broker").write_text(f"{address}\n")
    tests = Path(__file__).parents[1]
    return running(
        database,
        "consumer",
        "run",
        "handlers:on_submitted",
        folder=folder,
        PYTHONPATH=f"{folder}:{tests}:{tests.parent / 'compose'}:{os.environ.get('PYTHONPATH', '')}",
        FENCEPOST_CONFIG=str(folder / "fencepost.toml"),
        FENCEPOST_SECRETS_DIR=str(folder / "secrets"),
        FENCEPOST_CONSUMER_CONCURRENCY="2",
    )


def handled(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY operation").fetchall()]


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
def test_consumer_runs_a_handler_with_settings_serves_health_drains_and_tells_no_payload(
    services: Services, database18: Database, tmp_path: Path, kind: str
) -> None:
    sent: list[Envelope | bytes] = [
        envelope(operation="op-1"),
        envelope(operation="poison", document="canary-payload"),
        b"canary-payload",
    ]
    port = free_port()
    if kind == "kafka":
        kafka = services.kafka()
        topic = kafka.topic()
        produce(kafka, topic, sent)
        more = f'topics = ["{topic}"]\ngroup = "{topic}"\noptions = {{ "session.timeout.ms" = 6000 }}'
        child = consuming(database18, tmp_path, kind, kafka.bootstrap, more, port)
    else:
        rabbitmq = services.rabbitmq()
        queue = rabbitmq.name()
        declare(rabbitmq, queue)
        publish(rabbitmq, "", queue, sent)
        child = consuming(database18, tmp_path, kind, rabbitmq.url, f'queue = "{queue}"', port)
    with child:
        child.says("health is served")
        wait_for(lambda: ask(port, "/readyz").status == 200, 30, "the consumer to be ready")
        wait_for(lambda: "fencepost_consumer_handled_total" in ask(port, "/metrics").text, 30, "metrics")
        with database18.connect(autocommit=True) as conn:
            dead = "SELECT count(*) = 2 FROM fencepost.dead_letter"
            wait_for(lambda: conn.execute(dead).fetchone() == (True,), 30, "both dead letters")
        assert child.terminate() == 0
    assert handled(database18) == ["op-1"]
    lines = [json.loads(line) for line in child.text.splitlines()]
    assert any(line["message"].startswith("consumer handlers:on_submitted runs") for line in lines)
    assert "canary-payload" not in child.text and "guest" not in child.text


def test_a_second_signal_ends_a_consumer_at_once_and_its_message_stays(
    services: Services, database18: Database, tmp_path: Path
) -> None:
    rabbitmq = services.rabbitmq()
    queue = rabbitmq.name()
    declare(rabbitmq, queue)
    publish(rabbitmq, "", queue, [envelope(operation="slow")])
    with consuming(database18, tmp_path, "rabbitmq", rabbitmq.url, f'queue = "{queue}"', free_port()) as child:
        child.says("inside")
        os.kill(child.pid, signal.SIGTERM)
        child.says("draining")
        assert child.terminate(30) == 128 + signal.SIGTERM
    assert handled(database18) == []
    wait_for(lambda: left(rabbitmq, queue) == 1, 20, "the message to be given back")


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
def test_a_handler_that_outlasts_the_drain_keeps_no_consumer_from_ending_and_the_next_one_handles_its_message(
    services: Services, database18: Database, tmp_path: Path, kind: str
) -> None:
    @inbox(consumer="reports")
    def at_last(tx: Connection[Any], event: Submitted) -> None:
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    sent = [envelope(operation="before"), envelope(operation="slow")]
    following: KafkaRunner | RabbitRunner
    if kind == "kafka":
        kafka = services.kafka()
        where = kafka.topic()
        produce(kafka, where, sent)
        address, more = kafka.bootstrap, f'topics = ["{where}"]\ngroup = "{where}"'
        following = KafkaRunner(at_last, database18.dsn, bootstrap=address, topics=[where], group=where)
    else:
        rabbitmq = services.rabbitmq()
        where = rabbitmq.name()
        declare(rabbitmq, where)
        publish(rabbitmq, "", where, sent)
        address, more = rabbitmq.url, f'queue = "{where}"'
        following = RabbitRunner(at_last, database18.dsn, url=address, queue=where)
    with consuming(database18, tmp_path, kind, address, f"{more}\ndrain = 1", free_port()) as child:
        child.says("inside")  # And stays there for a minute.
        wait_for(lambda: handled(database18) == ["before"], 20, "the other one")
        assert child.terminate(25) == 0, child.text
    assert handled(database18) == ["before"]

    stop = threading.Event()
    thread = threading.Thread(target=following.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: handled(database18) == ["before", "slow"], 30, "the next consumer")
    finally:
        stop.set()
        thread.join(30)
    with database18.connect() as conn:
        arrivals = conn.execute("SELECT operation, arrivals FROM fencepost.delivery ORDER BY 1").fetchall()
        assert conn.execute("SELECT count(*) FROM fencepost.dead_letter").fetchone() == (0,)
    assert [row for row in arrivals if row[0] == "slow"] == [("slow", 1)], "the first arrival was rolled back"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "[consumer.kind]"),
        ({"KIND": "kafka"}, "[consumer.address]"),
        ({"KIND": "kafka", "ADDRESS": "127.0.0.1:1"}, "[consumer.topics]"),
        ({"KIND": "kafka", "ADDRESS": "127.0.0.1:1", "TOPICS": "reports"}, "FENCEPOST_CONSUMER_TOPICS"),
        ({"KIND": "rabbitmq", "ADDRESS": "amqp://app:hunter2@127.0.0.1:1/"}, "[consumer.queue]"),
        ({"KIND": "rabbitmq", "ADDRESS": "amqp://app:hunter2@mq.example/", "QUEUE": "q"}, "[consumer.url]"),
        ({"KIND": "kafka", "ADDRESS": "127.0.0.1:1", "TOPICS": '["reports"]', "BATCH": "1001"}, "[consumer.batch]"),
        ({"KIND": "rabbitmq", "ADDRESS": "amqp://127.0.0.1:1/", "QUEUE": "q", "BATCH": "17"}, "[consumer.prefetch]"),
        (
            {"KIND": "rabbitmq", "ADDRESS": "amqp://127.0.0.1:1/", "QUEUE": "q", "OPTIONS": '{"window": "5"}'},
            "[consumer.options.window]",
        ),
        (
            {
                "KIND": "kafka",
                "ADDRESS": "kafka.example:9092",
                "TOPICS": '["reports"]',
                "OPTIONS": '{"security.protocol": "SASL_PLAINTEXT", "sasl.password": "hunter2"}',
            },
            "[consumer.security.protocol]",
        ),
        (
            {"KIND": "rabbitmq", "ADDRESS": "amqp://127.0.0.1:1/", "QUEUE": "q", "HEALTH_ADDRESS": "0.0.0.0:80"},
            "[consumer.health_address]",
        ),
    ],
)
def test_a_handler_without_a_usable_broker_is_refused_by_the_settings_name(
    database18: Database,
    fencepost: Fencepost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, str],
    words: str,
) -> None:
    (tmp_path / "lonely_handlers.py").write_text(HANDLER)
    monkeypatch.chdir(tmp_path)

    settings = {f"FENCEPOST_CONSUMER_{name}": value for name, value in more.items()}
    done = fencepost(database18, "consumer", "run", "lonely_handlers:on_submitted", **settings)

    assert done.code == 2
    assert words in done.line


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


def test_worker_with_a_doorbell_that_would_never_ring_is_refused_in_one_line(
    database18: Database, pgbouncer18: Pooler, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "rung_worker.py").write_text(WORKER)
    pooled = Database(pgbouncer18.dsn(database18.dsn), database18.state)

    done = fencepost(pooled, "worker", "run", "rung_worker:worker", "--doorbell")

    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert "no notification arrives" in line and "[doorbell]" in line


def test_target_that_is_no_consumer_is_refused(database18: Database, fencepost: Fencepost, tmp_path: Path) -> None:
    (tmp_path / "odd_consumer.py").write_text(CONSUMER)

    done = fencepost(database18, "consumer", "run", "odd_consumer:other")

    assert done.code == 2
    assert "neither a handler nor a runner nor a function" in done.line


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
        ("jobs", "cancel", *which, "--class", "c", "--reason-text", "r"),
        ("relay", "run", "--once"),
        ("relay", "run"),
        ("worker", "run", "early_worker:worker"),
    ):
        done = fencepost(empty_database, *arguments, FENCEPOST_DESTINATIONS=destinations)
        assert done.code == 1, arguments
        assert "run `fencepost migrate`" in done.err.splitlines()[-1], arguments
