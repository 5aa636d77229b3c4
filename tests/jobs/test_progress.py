"""Progress is the current attempt's, and what a job returned is in the commit that completed it, or nowhere."""

import asyncio
import logging
from concurrent.futures import Future
from typing import Any, cast

import pytest

from fencepost.jobs.claim import Job
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.fence import complete
from fencepost.jobs.lanes import Lanes
from fencepost.jobs.progress import Reporter, progress, report
from fencepost.jobs.publish import publish
from fencepost.jobs.result import KEPT_BYTES_MAX, Result, complete_with, keepable, result
from fencepost.jobs.worker import Backoff, Worker
from fencepost.schemas.errors import EffectOpen, InvalidInput, StaleFence
from support.database import Database
from support.jobs import CLASS, Conn, begun, claimed, column, expire, given, results, save, show
from support.processes import wait_for
from support.workers import QUICK, becomes, quick, running

WHICH: dict[str, Any] = {"tenant": "t", "operation": "op-1", "job_class": CLASS}


def told(conn: Conn) -> tuple[float, str, bool] | None:
    found = progress(conn, **WHICH)
    return None if found is None else (found.fraction, found.note, found.current)


def returned(conn: Conn, operation: str = "op-1") -> object:
    found = result(conn, **(WHICH | {"operation": operation}))
    return None if found is None else found.value


def test_only_the_current_attempt_tells_how_far_it_is(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        assert progress(conn, **WHICH) is None
        first = claimed(conn).fence
        report(conn, first, 0.4, "page 4 of 10")
        assert told(conn) == (0.4, "page 4 of 10", True)
        report(conn, first, 0.5)
        assert told(conn) == (0.5, "", True)
        expire(conn)
        with pytest.raises(StaleFence) as error:
            report(conn, first, 0.6)
        assert error.value.field == "lease"
        second = claimed(conn).fence
        with pytest.raises(StaleFence) as error:
            report(conn, first, 0.6)
        assert error.value.field == "generation" and told(conn) == (0.5, "", False)
        report(conn, second, 0.1)
        assert told(conn) == (0.1, "", True)
        complete(conn, second)
        assert told(conn) == (0.1, "", False)


def test_what_is_no_fraction_or_too_long_is_refused_by_client_and_database(database18: Database) -> None:
    sql = "SELECT fencepost.report_progress('t', 'op-1', %(c)s, 1, gen_random_uuid(), 'w', 1, %(f)s, %(n)s)"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = claimed(conn).fence
        report(conn, f, 1, "x" * 200)
        for field, fraction, note in (
            ("fraction", -0.1, ""),
            ("fraction", 1.1, ""),
            ("fraction", float("nan"), ""),
            ("note", 0.5, "x" * 201),
        ):
            with pytest.raises(InvalidInput) as refused:
                report(conn, f, fraction, note)
            assert refused.value.field == field
            with pytest.raises(InvalidInput) as refused:
                conn.execute(sql, {"c": CLASS, "f": fraction, "n": note})
            assert refused.value.field == field
        assert told(conn) == (1, "x" * 200, True)


class Here:
    """Lanes that do the work at once."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn

    def send(self, work: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(work(self.conn))
        except Exception as error:  # noqa: BLE001 (as lanes do)
            future.set_exception(error)
        return future


def test_a_handler_may_tell_as_often_as_it_likes_and_the_database_hears_it_now_and_then(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fencepost")
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f, lanes = claimed(conn).fence, cast(Lanes, Here(conn))
        slow, quick_ = Reporter(f, lanes, 3600.0), Reporter(f, lanes, 0.0)
        slow.tell(0.1, "first")
        for _ in range(1000):
            slow.tell(0.2, "too soon")
        assert told(conn) == (0.1, "first", True)
        for fraction in (0.3, 0.4):
            quick_.tell(fraction, "later")
            assert told(conn) == (fraction, "later", True)
        expire(conn)
        quick_.tell(0.5, "stale")  # refused, and nobody hears of it
        assert told(conn) == (0.4, "later", True)
        assert [r.levelno for r in caplog.records if r.name == "fencepost.jobs"] == [logging.DEBUG]
        with pytest.raises(InvalidInput):
            slow.tell(2.0, "")


def test_handlers_tell_and_return_and_both_can_be_read(database18: Database) -> None:
    worker = Worker()

    @worker.job("a.sync", **QUICK)
    def sync(ctx: Context, job: Job) -> dict[str, object]:
        ctx.progress(0.4, "page 4 of 10")
        with database18.connect(autocommit=True) as conn:
            wait_for(lambda: progress(conn, **which("a.sync")), 20, "the report")
        return {"pages": 10, "rate": 0.5}

    @worker.job("a.async", **QUICK)
    async def asynchronous(ctx: AsyncContext, job: Job) -> list[int]:
        ctx.progress(1.0)
        await asyncio.sleep(0)
        return [1, 2]

    @worker.job("a.published", **QUICK)
    def published(ctx: Context, job: Job) -> object:
        ctx.publish(lambda tx: save(tx, job.operation), result={"rows": 1})
        return object()  # of a handler that has published nothing is taken

    @worker.job("a.nothing", **QUICK)
    def nothing(ctx: Context, job: Job) -> None: ...

    with database18.connect(autocommit=True) as conn:
        for job_class in worker.classes:
            given(conn, job_class, job_class=job_class)
        with running(worker, database18):
            for job_class in worker.classes:
                becomes(conn, "done", job_class, job_class=job_class)
        found = {c: result(conn, **which(c)) for c in worker.classes}
        values = {c: r.value if isinstance(r, Result) else None for c, r in found.items()}
        assert values == {
            "a.sync": {"pages": 10, "rate": 0.5},
            "a.async": [1, 2],
            "a.published": {"rows": 1},
            "a.nothing": None,
        }
        made = found["a.sync"]
        assert made is not None and made.attempt == column(conn, "done_attempt", "a.sync") and "pages" not in repr(made)
        assert results(conn, "a.published") == ["a"]
        with pytest.raises(InvalidInput):
            conn.execute("UPDATE fencepost.result SET result = '1'")


def which(job_class: str) -> dict[str, Any]:
    return {"tenant": "t", "operation": job_class, "job_class": job_class}


def test_what_cannot_be_kept_fails_the_attempt_and_completes_nothing(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, **quick(max_attempts=1, backoff=Backoff(0.0, 0.0)))
    def handler(ctx: Context, job: Job) -> object:
        if job.operation == "op-publish":
            ctx.publish(lambda tx: save(tx, job.operation), result=object())
        return {"op-1": object(), "op-large": "x" * KEPT_BYTES_MAX, "op-fits": "x" * (KEPT_BYTES_MAX - 2)}[
            job.operation
        ]

    with database18.connect(autocommit=True) as conn:
        for operation in ("op-1", "op-large", "op-fits", "op-publish"):
            given(conn, operation)
        with running(worker, database18):
            becomes(conn, "done", "op-fits")
            for operation in ("op-1", "op-large", "op-publish"):
                becomes(conn, "poison", operation)
                assert column(conn, "detail", operation) == "handler_raised: InvalidInput"
                assert returned(conn, operation) is None
        assert returned(conn, "op-fits") == "x" * (KEPT_BYTES_MAX - 2) and results(conn, "op-publish") == []


def test_a_result_is_kept_behind_the_fence_or_not_at_all(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        first = claimed(conn).fence
        expire(conn)
        second = claimed(conn).fence
        kept = keepable({"by": "a"})
        with pytest.raises(StaleFence):
            complete_with(conn, first, kept)
        with pytest.raises(StaleFence):
            publish(conn, first, lambda tx: save(tx), result=kept)
        with pytest.raises(InvalidInput):
            complete_with(conn, second, b"x" * (KEPT_BYTES_MAX + 1))
        begun(conn, second)
        with pytest.raises(EffectOpen):
            complete_with(conn, second, kept)
        assert (show(conn), returned(conn), results(conn)) == ("running", None, [])

        given(conn, "op-2")
        f = claimed(conn, "op-2").fence
        with pytest.raises(RuntimeError):
            publish(conn, f, lambda tx: failing(), result=kept)
        assert returned(conn, "op-2") is None
        publish(conn, f, lambda tx: save(tx, "op-2"), result=keepable({"by": "b"}))
        assert (returned(conn, "op-2"), results(conn, "op-2"), show(conn, "op-2")) == ({"by": "b"}, ["a"], "done")
        with pytest.raises(StaleFence):
            complete_with(conn, f, kept)


def failing() -> None:
    raise RuntimeError("the callback failed")
