"""Lanes with a budget repeat what may pass, on a connection that lives as on one that was lost; nothing else."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs.lanes import Lanes
from fencepost.schemas.connect import NoAnswer
from support.database import Database
from support.proxy import Proxy

FAIL = "DO $$ BEGIN RAISE EXCEPTION 'made by the test' USING ERRCODE = '{}'; END $$"
PASSING = {
    "40P01": psycopg.errors.DeadlockDetected,
    "40001": psycopg.errors.SerializationFailure,
    "55P03": psycopg.errors.LockNotAvailable,
}


@contextmanager
def lanes(database: Database, budget: float) -> Generator[Lanes]:
    made = Lanes(database.dsn, "test", 1, budget=budget)
    try:
        yield made
    finally:
        made.close()


def failing(code: str, times: int, pids: list[int]) -> Callable[[psycopg.Connection[Any]], str]:
    """Work that PostgreSQL refuses so many times, inside a transaction; every try leaves its session in `pids`."""

    def work(conn: psycopg.Connection[Any]) -> str:
        pids.append(conn.info.backend_pid)
        with conn.transaction():
            if len(pids) <= times:
                conn.execute(FAIL.format(code).encode())
            return "done"

    return work


@pytest.mark.parametrize("code", PASSING)
def test_a_deadlock_a_conflict_and_a_lock_timeout_are_tried_again_on_the_same_connection(
    database18: Database, code: str
) -> None:
    pids: list[int] = []
    with lanes(database18, 10.0) as outcomes:
        assert outcomes.send(failing(code, 2, pids)).result(20) == "done"
    assert len(pids) == 3 and len(set(pids)) == 1


@pytest.mark.parametrize("code", PASSING)
def test_without_a_budget_and_after_it_the_error_comes_out(database18: Database, code: str) -> None:
    once: list[int] = []
    many: list[int] = []
    with lanes(database18, 0.0) as work, pytest.raises(PASSING[code]):
        work.send(failing(code, 1, once)).result(20)
    with lanes(database18, 3.0) as outcomes:
        outcomes.send(lambda conn: None).result(20)  # it is connected: all of the budget is for the work
        started = time.monotonic()
        with pytest.raises(PASSING[code]):
            outcomes.send(failing(code, 1000, many)).result(40)
    assert len(once) == 1 and 1 < len(many) < 20 and time.monotonic() - started < 30


def test_a_cancelled_waiter_takes_neither_the_work_back_nor_its_lane_with_it(database18: Database) -> None:
    go, done = threading.Event(), list[str]()

    def work(name: str) -> Callable[[psycopg.Connection[Any]], str]:
        def run(conn: psycopg.Connection[Any]) -> str:
            assert go.wait(20)
            done.append(name)
            return name

        return run

    async def cancelled(made: Lanes) -> None:
        waiting = [asyncio.ensure_future(asyncio.wrap_future(made.send(work(name)))) for name in ("runs", "queued")]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        assert await asyncio.gather(*waiting, return_exceptions=True) and all(each.cancelled() for each in waiting)

    with lanes(database18, 0.0) as made:
        asyncio.run(cancelled(made))
        go.set()
        assert made.send(work("after")).result(20) == "after"
    assert done == ["runs", "queued", "after"]


def test_what_will_not_pass_is_not_repeated(database18: Database) -> None:
    with lanes(database18, 10.0) as outcomes:
        for code in ("23505", "57014"):
            pids: list[int] = []
            with pytest.raises(psycopg.Error) as error:
                outcomes.send(failing(code, 1, pids)).result(20)
            assert error.value.sqlstate == code and len(pids) == 1


def test_an_outcome_that_waits_for_a_locked_row_is_written_once_the_row_is_free(database18: Database) -> None:
    tries: list[int] = []
    with database18.connect() as holder, lanes(database18, 10.0) as outcomes:
        holder.execute("LOCK TABLE fencepost.gate IN EXCLUSIVE MODE")

        def work(conn: psycopg.Connection[Any]) -> bool:
            tries.append(1)
            if len(tries) == 2:
                holder.rollback()
            conn.execute("SET lock_timeout = '50ms'")
            with conn.transaction():
                conn.execute("LOCK TABLE fencepost.gate IN ROW SHARE MODE")
            return True

        assert outcomes.send(work).result(20)
    assert len(tries) == 2


def test_a_lane_leaves_a_silent_database_at_its_deadline_and_goes_on(database18: Database) -> None:
    info = conninfo_to_dict(database18.dsn)
    with Proxy(int(str(info["port"])), str(info["host"])) as proxy:
        through = make_conninfo(database18.dsn, host="127.0.0.1", port=proxy.port)
        made = Lanes(through, "test", 1, answer_within=3.0)

        def one(conn: psycopg.Connection[Any]) -> tuple[Any, ...] | None:
            return conn.execute("SELECT 1").fetchone()

        try:
            assert made.send(one).result(20) == (1,)  # the control
            proxy.blackhole()
            with pytest.raises(NoAnswer):
                made.send(one).result(20)
            proxy.heal()
            assert made.send(one).result(20) == (1,)
        finally:
            made.close()
