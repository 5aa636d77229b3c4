"""`fencepost jobs pause|resume|queues`, and how status and doctor tell what is paused."""

import json

import pytest

from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.context import Context
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker
from fencepost.operate import target
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.identity import JobClass
from support.command_line import Fencepost
from support.database import Database

CLASS = "report.make"
SLOW = ("--queue", "slow", "--reason", "the provider is down", "--actor", "ann")


def test_an_operator_pauses_a_queue_and_everybody_sees_it(database18: Database, fencepost: Fencepost) -> None:
    with database18.connect(autocommit=True) as conn:
        assert "no queue or class is paused" in fencepost(database18, "doctor").out
        register_class(conn, JobClassPolicy(JobClass(CLASS), queue="slow", limit=3))
        with conn.transaction():
            submit(conn, CLASS, tenant="acme", operation="op", args={"text": "secret-content"})

        assert fencepost(database18, "jobs", "pause", *SLOW).out == "queue slow: paused\n"
        assert fencepost(database18, "jobs", "pause", *SLOW).out == "queue slow: already_paused\n"
        assert claim(conn, "w", [CLASS], 1) == []
        (row,) = json.loads(fencepost(database18, "jobs", "queues", "--json").out)
        told = (row["class"], row["queue"], row["state"], row["paused"], row["actor"], row["reason"], row["running"])
        assert told == (CLASS, "slow", "paused", "queue", "ann", "the provider is down", 0)
        assert "paused" in fencepost(database18, "jobs", "queues").out
        states = json.loads(fencepost(database18, "status", "--json").out)["states"]
        assert ("queue", "paused", "slow") in [(s["axis"], s["state"], s["kind"]) for s in states]
        doctor = fencepost(database18, "doctor")
        assert doctor.code == 0 and "paused: queue slow (" in doctor.out

        assert fencepost(database18, "jobs", "resume", *SLOW).out == "queue slow: resumed\n"
        assert fencepost(database18, "jobs", "resume", *SLOW).out == "queue slow: not_paused\n"
        assert len(claim(conn, "w", [CLASS], 1)) == 1
        paused = fencepost(database18, "jobs", "pause", "--class", CLASS, "--reason", "why")
        assert paused.out == f"class {CLASS}: paused\n"


def test_a_pause_of_nothing_is_one_line(database18: Database, fencepost: Fencepost) -> None:
    with database18.connect(autocommit=True) as conn:
        register_class(conn, JobClassPolicy(JobClass(CLASS), queue="slow"))
    assert fencepost(database18, "jobs", "pause", *SLOW).code == 0
    for arguments, field in (
        (("--queue", "slwo"), "[queue]"),
        (("--class", "report.made"), "[class]"),
        ((), "[scope]"),
        (("--queue", "slow", "--class", CLASS), "[scope]"),
    ):
        refused = fencepost(database18, "jobs", "pause", *arguments, "--reason", "why")
        assert refused.code == 1 and field in refused.line


def test_a_worker_is_told_its_queues_on_the_command_line(
    database18: Database, fencepost: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run(_: Worker, __: str, *, queues: object, concurrency: object, **___: object) -> None:
        asked.append((queues, concurrency))

    def load(_: str, __: str) -> Worker:
        return Worker()

    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr(target, "load", load)
    start = ("worker", "run", "app:worker")
    assert fencepost(database18, *start, "--queue", "slow=2", "--queue", "a=b=10").code == 0
    assert fencepost(database18, *start, "--concurrency", "7").code == 0
    assert asked == [({"slow": 2, "a=b": 10}, None), (None, 7)]
    for wrong in ("slow", "slow=", "=2", "slow=-1", "slow=two"):
        refused = fencepost(database18, *start, "--queue", wrong)
        assert refused.code == 2 and "[queues]" in refused.line
    assert fencepost(database18, *start, "--queue", "slow=2", "--queue", "slow=3").code == 2


def handler(_: Context, __: Job) -> None:
    """Never called."""


def test_the_refusal_of_a_queue_names_those_that_there_are() -> None:
    worker = Worker()
    worker.job(CLASS, queue="slow")(handler)
    with pytest.raises(ConfigError, match="it has: slow"):
        worker.run("postgresql://127.0.0.1:1/none", queues={"slwo": 2})
