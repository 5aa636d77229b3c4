"""Cancel and completion are ordered by one lock: at every moment one of them wins, and both say so (G10, B19)."""

import threading

import pytest

from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import Job, claim
from fencepost.jobs.context import Context
from fencepost.jobs.fence import complete, fence
from fencepost.jobs.publish import FencedTransaction
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import StaleFence, UnknownJob
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    begun,
    claimed,
    column,
    effect,
    given,
    results,
    save,
    show,
    two,
    waiting,
)
from support.workers import QUICK, becomes, running


def stop(conn: Conn, operation: str = "op-1") -> str:
    return cancel(conn, "t", operation, CLASS, actor="ann", reason="no more")


def test_before_the_claim_nothing_is_ever_claimed(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        assert stop(conn) == "cancelled" and stop(conn) == "already_cancelled"
        assert claim(conn, "w", [CLASS], 10) == [] and show(conn) == "cancelled"
        with pytest.raises(UnknownJob):
            stop(conn, "nothing")


def test_after_the_claim_and_inside_the_handler_nothing_is_published_and_no_retry_is_scheduled(
    database: Database,
) -> None:
    worker = Worker()
    entered, release = threading.Event(), threading.Event()
    refused: list[StaleFence] = []

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        entered.set()
        assert release.wait(10)
        try:
            ctx.publish(lambda tx: save(tx))
        except StaleFence as error:
            refused.append(error)
            raise

    with database.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database):
            assert entered.wait(10)
            assert stop(conn) == "cancelled"
            release.set()
        given(conn, "control")
        assert [error.field for error in refused] == ["state"]
        assert (
            show(conn) == "cancelled"
            and results(conn) == []
            and claim(conn, "w", [CLASS], 10)[0].operation == "control"
        )


def test_inside_the_callback_the_cancel_waits_and_comes_too_late(database: Database) -> None:
    worker = Worker()
    entered, release = threading.Event(), threading.Event()

    def callback(tx: FencedTransaction) -> None:
        save(tx)
        entered.set()
        assert release.wait(10)

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        ctx.publish(callback)

    with database.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database):
            assert entered.wait(10)
            late = Background(database, stop)
            waiting(conn, late.pid)
            release.set()
            assert late.outcome() == "too_late"
            becomes(conn, "done")
        assert results(conn) == ["a"]


def test_a_cancel_that_holds_the_row_first_wins_over_the_publication_behind_it(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        job = claimed(auto)
        assert stop(manual) == "cancelled"

        def publication(conn: Conn) -> None:
            with conn.transaction():
                fence(conn, job.fence)
                save(conn)
                complete(conn, job.fence)

        behind = Background(database, publication)
        waiting(auto, behind.pid)
        manual.commit()
        with pytest.raises(StaleFence) as refused:
            behind.outcome()
        assert refused.value.field == "state"
        assert results(auto) == [] and show(auto) == "cancelled"


def test_after_the_publication_a_cancel_is_too_late_and_the_job_stays_done(database: Database) -> None:
    worker = Worker()
    entered, release = threading.Event(), threading.Event()

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        ctx.publish(lambda tx: save(tx))
        entered.set()
        assert release.wait(10)
        raise ValueError("after the publication")

    with database.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database):
            assert entered.wait(10)
            assert stop(conn) == "too_late"
            release.set()
        assert show(conn) == "done" and results(conn) == ["a"]
        assert conn.execute("SELECT count(*) FROM fencepost.decision").fetchone() == (0,)


def test_a_begun_effect_keeps_its_record_and_both_are_shown(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        begun(conn, job.fence)
        assert stop(conn) == "cancelled" and column(conn, "generation") == job.fence.generation + 1
        assert stop(conn) == "already_cancelled"
        shown = conn.execute("SELECT axis, state, count FROM fencepost.status ORDER BY axis").fetchall()
        assert shown == [("effect", "pending", 1), ("job", "cancelled", 1)]
        assert effect(conn, "state") == "pending"
