"""Queues: a paused queue or class starts nothing and loses nothing; a worker runs no more of each queue than it was told."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fencepost.jobs import effects
from fencepost.jobs.claim import Job, JobClassPolicy, claim, marks, register_class
from fencepost.jobs.context import Context
from fencepost.jobs.publish import publish
from fencepost.jobs.queues import Paused, Resumed, pause, resume
from fencepost.jobs.renew import renew
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import ConfigError, InvalidInput, UnknownClass
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    begun,
    claimed,
    column,
    expire,
    given,
    results,
    save,
    show,
    two,
    waiting,
)
from support.processes import wait_for
from support.workers import becomes, quick, running

OTHER = "report.other"
WHO = {"actor": "ann", "reason": "the provider is down"}
PAUSES: dict[str, tuple[Callable[[Conn], Paused], Callable[[Conn], Resumed]]] = {
    "queue": (lambda conn: pause(conn, queue="slow", **WHO), lambda conn: resume(conn, queue="slow", **WHO)),
    "class": (lambda conn: pause(conn, job_class=CLASS, **WHO), lambda conn: resume(conn, job_class=CLASS, **WHO)),
}


@pytest.mark.parametrize("scope", PAUSES)
def test_what_is_paused_starts_nothing_and_what_runs_publishes(database: Database, scope: str) -> None:
    stop, go = PAUSES[scope]
    with database.connect(autocommit=True) as conn:
        given(conn, "running", queue="slow")
        given(conn, "effect", queue="slow")
        jobs = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS], 10)}
        given(conn, "waiting", queue="slow")
        given(conn, "other", job_class=OTHER)
        assert stop(conn) == "paused"
        assert [job.operation for job in claim(conn, "w", [CLASS, OTHER], 10)] == ["other"]
        renew(conn, jobs["running"])
        attempt = begun(conn, jobs["effect"])
        effects.record(conn, jobs["effect"], "e1", attempt, "success", receipt="r-1")
        for operation, f in jobs.items():
            publish(conn, f, partial(save, operation=operation))
            assert (show(conn, operation), results(conn, operation)) == ("done", ["a"])
        given(conn, "meanwhile", queue="slow")
        assert claim(conn, "w", [CLASS, OTHER], 10) == []
        assert go(conn) == "resumed"
        assert {job.operation for job in claim(conn, "w", [CLASS], 10)} == {"waiting", "meanwhile"}


def test_a_pause_waits_for_claims_under_way_and_nothing_starts_after_it(database18: Database) -> None:
    with two(database18) as (auto, manual):
        for number in range(3):
            given(auto, f"op-{number}")
        assert len(claim(manual, "w", [CLASS], 1)) == 1
        pausing = Background(database18, lambda conn: pause(conn, job_class=CLASS, **WHO))
        waiting(auto, pausing.pid)
        late = Background(database18, lambda conn: claim(conn, "w", [CLASS], 1))
        waiting(auto, late.pid)
        manual.commit()
        assert pausing.outcome() == "paused"
        assert late.outcome() == []
        assert [show(auto, f"op-{number}") for number in range(3)].count("running") == 1


def test_a_lease_that_ends_under_a_pause_is_taken_back_and_goes_on_after_it(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        claimed(conn)
        pause(conn, job_class=CLASS, **WHO)
        expire(conn)
        assert claim(conn, "w", [CLASS], 10) == []
        assert (show(conn), column(conn, "reason")) == ("queued", "lease_expired")
        resume(conn, job_class=CLASS, **WHO)
        assert claimed(conn).attempts == 2


def test_hints_made_under_a_pause_hide_nothing_after_it(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "before")
        pause(conn, job_class=CLASS, **WHO)
        hint = None
        for number in range(3):
            given(conn, f"op-{number}")
            assert claim(conn, "w", [CLASS], 10, hint) == []
            hint = marks(conn, [CLASS], hint)
        resume(conn, job_class=CLASS, **WHO)
        assert len(claim(conn, "w", [CLASS], 10, hint)) == 4


def test_queue_and_class_are_paused_apart(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, queue="slow")
        for stop, _ in PAUSES.values():
            stop(conn)
        assert resume(conn, job_class=CLASS, **WHO) == "resumed"
        assert claim(conn, "w", [CLASS], 1) == []
        # A class that moves to another queue leaves the pause behind; the queue can be resumed all the same.
        register_class(conn, JobClassPolicy(as_class(CLASS), queue="quick"))
        assert claimed(conn)
        assert resume(conn, queue="slow", **WHO) == "resumed"


def test_a_queue_and_a_class_of_one_name_are_two(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, queue="slow")
        given(conn, "op-2", job_class="slow", queue="quick")
        pause(conn, job_class="slow", **WHO)
        assert [job.operation for job in claim(conn, "w", [CLASS, "slow"], 2)] == ["op-1"]
        assert resume(conn, job_class="slow", **WHO) == "resumed"
        given(conn, "op-3", queue="slow")
        pause(conn, queue="slow", **WHO)
        assert [job.operation for job in claim(conn, "w", [CLASS, "slow"], 2)] == ["op-2"]
        resume(conn, queue="slow", **WHO)
        assert [job.operation for job in claim(conn, "w", [CLASS, "slow"], 2)] == ["op-3"]


def test_who_and_why_is_kept_and_once_more_changes_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, queue="slow")
        assert pause(conn, queue="slow", **WHO) == "paused"
        assert pause(conn, queue="slow", actor="bob", reason="me too") == "already_paused"
        row = "SELECT queue, state, paused, actor, reason FROM fencepost.queues"
        assert conn.execute(row).fetchall() == [("slow", "paused", "queue", "ann", "the provider is down")]
        assert resume(conn, queue="slow", actor="bob", reason="it is back") == "resumed"
        assert resume(conn, queue="slow", actor="bob", reason="it is back") == "not_paused"
        assert conn.execute(row).fetchall() == [("slow", "open", None, None, None)]
        assert conn.execute("SELECT kind, actor, reason, subject, verdict FROM fencepost.decision").fetchall() == [
            ("pause", "ann", "the provider is down", "queue slow", "paused"),
            ("resume", "bob", "it is back", "queue slow", "resumed"),
        ]


def test_a_pause_of_nothing_is_refused(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, queue="slow")
        assert pause(conn, queue="slow", **WHO) == "paused"
        with pytest.raises(UnknownClass):
            pause(conn, job_class="report.analyze", **WHO)
        for field, wrong in (
            ("queue", {"queue": "slwo"}),
            ("queue", {"queue": ""}),
            ("scope", {}),
            ("scope", {"queue": "slow", "job_class": CLASS}),
            ("actor", {"queue": "slow", "actor": ""}),
            ("reason", {"queue": "slow", "reason": " "}),
        ):
            for act in (pause, resume):
                if (field, act) != ("queue", resume) or wrong == {"queue": ""}:
                    with pytest.raises(InvalidInput) as refused:
                        act(conn, **(WHO | wrong))
                    assert refused.value.field == field
        with pytest.raises(InvalidInput) as refused:
            conn.execute("SELECT fencepost.pause('tenant', 't', 'ann', 'why')")
        assert refused.value.field == "scope"


def test_status_tells_what_is_paused_and_what_is_at_its_limit(database18: Database) -> None:
    held = "SELECT axis, state, kind, count FROM fencepost.status WHERE axis IN ('queue', 'class') ORDER BY 1"
    states = "SELECT class, state, job_limit, running, tenants_at_limit FROM fencepost.queues ORDER BY class"
    with database18.connect(autocommit=True) as conn:
        given(conn, tenant_limit=1, limit=2)
        given(conn, "op-2", tenant="u", tenant_limit=1, limit=2)
        given(conn, job_class=OTHER, queue="slow")
        assert len(claim(conn, "w", [CLASS], 1)) == 1
        assert conn.execute(held).fetchall() == []
        assert conn.execute(states).fetchall() == [(CLASS, "open", 2, 1, 1), (OTHER, "open", None, None, None)]
        assert len(claim(conn, "w", [CLASS], 1)) == 1
        pause(conn, queue="slow", **WHO)
        assert conn.execute(held).fetchall() == [("class", "at_limit", CLASS, 2), ("queue", "paused", "slow", 1)]
        assert conn.execute(states).fetchall() == [(CLASS, "at_limit", 2, 2, 2), (OTHER, "paused", None, None, None)]


def three() -> tuple[Worker, threading.Event, threading.Event]:
    """A worker of three classes in three queues whose handlers last until they are told."""
    worker = Worker()
    slow, quick_ = threading.Event(), threading.Event()
    for job_class, queue, until in ((CLASS, "slow", slow), (OTHER, "quick", quick_), ("report.third", "default", slow)):

        def handler(_: Context, __: Job, until: threading.Event = until) -> None:
            assert until.wait(60)

        worker.job(job_class, queue=queue, **quick(lease=60.0))(handler)
    return worker, slow, quick_


def test_a_worker_runs_no_more_of_a_queue_than_it_was_told_and_serves_no_other(database18: Database) -> None:
    worker, slow, quick_ = three()
    count = "SELECT class, exec, count(*)::int FROM fencepost.job GROUP BY 1, 2 ORDER BY 1, 2"
    with database18.connect(autocommit=True) as conn:
        given(conn, "first", job_class="report.third")
        for number in range(6):
            given(conn, f"op-{number}", queue="slow", lease=60.0)
            given(conn, f"op-{number}", queue="quick", job_class=OTHER, lease=60.0)
        with running(worker, database18, queues={"slow": 1, "quick": 3}):
            full = [
                (CLASS, "queued", 5),
                (CLASS, "running", 1),
                (OTHER, "queued", 3),
                (OTHER, "running", 3),
                ("report.third", "queued", 1),
            ]
            wait_for(lambda: conn.execute(count).fetchall() == full, 20, "both queues to be full")
            quick_.set()
            for number in range(6):
                becomes(conn, "done", f"op-{number}", job_class=OTHER)
            slow_now = "SELECT count(*) FROM fencepost.job WHERE class = %(c)s AND exec <> 'queued'"
            assert conn.execute(slow_now, {"c": CLASS}).fetchone() == (1,)
            slow.set()
            for number in range(6):
                becomes(conn, "done", f"op-{number}")
        assert show(conn, "first", job_class="report.third") == "queued"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("queues", {"queues": {"slwo": 1}}),
        ("queues", {"queues": {"slow": 0}}),
        ("concurrency", {"queues": {}}),
        ("concurrency", {"queues": {"slow": 200, "quick": 57}}),
        ("concurrency", {"queues": {"slow": 1}, "concurrency": 2}),
        ("concurrency", {"concurrency": 0}),
        ("concurrency", {"concurrency": 257}),
    ],
)
def test_what_a_worker_cannot_serve_is_refused_before_it_connects(field: str, options: dict[str, Any]) -> None:
    worker, _, _ = three()
    with pytest.raises(ConfigError) as refused:
        worker.run("postgresql://127.0.0.1:1/none", **options)
    assert refused.value.field == field
