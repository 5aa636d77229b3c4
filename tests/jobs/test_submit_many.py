"""A bulk is in the caller's commit, each of its jobs as if it had been submitted alone, or not at all."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.submit import submit
from fencepost.jobs.submit_many import Submission, submit_many
from fencepost.schemas.connect import connect_async
from fencepost.schemas.errors import InvalidInput, OperationConflict, WrongTransaction
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import CLASS, Background, Conn, two, waiting

ONE: dict[str, Any] = {"tenant": "t", "operation": "a", "args": {"n": 1}}


def one(**parts: Any) -> Submission:
    return Submission(**(ONE | parts))


def rows(conn: Conn, *but: str) -> list[tuple[Any, ...]]:
    return conn.execute(
        "SELECT tenant, operation, priority, args, meaning, digest, epoch, accepted_epoch, source_event FROM fencepost.job"
        " WHERE operation <> ALL (%(but)s) ORDER BY tenant, operation",
        {"but": list(but)},
    ).fetchall()


def test_jobs_of_a_bulk_are_what_they_would_be_alone_and_commit_with_the_caller(database: Database) -> None:
    with two(database) as (auto, manual):
        jobs: list[dict[str, Any]] = [
            {"tenant": f"t{n % 3}", "operation": f"o{n}", "args": {"n": n}, "priority": n % 2} for n in range(7)
        ]
        for job in jobs:
            submit(manual, CLASS, **job)
        alone = rows(manual)
        manual.rollback()
        assert submit_many(manual, CLASS, (Submission(**job) for job in jobs)) == [True] * 7
        assert rows(auto) == []
        assert rows(manual) == alone
        manual.commit()
        assert rows(auto) == alone


def test_after_a_restore_jobs_of_a_bulk_are_doubted_as_they_would_be_alone(database18: Database) -> None:
    before = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
    with database18.connect() as conn:
        conn.execute("UPDATE fencepost.installation SET recovered_at = clock_timestamp()")
        submit(conn, CLASS, **ONE, source_event=before)
        submit_many(conn, CLASS, [one(operation="b", source_event=before), one(operation="c")])
        doubted = conn.execute(
            "SELECT operation FROM fencepost.job WHERE suspect AND quiescent_at IS NOT NULL ORDER BY 1"
        )
        assert doubted.fetchall() == [("a",), ("b",)]


def test_copies_are_not_new_and_another_meaning_refuses_the_whole_call(database18: Database) -> None:
    with database18.connect() as conn:
        jobs = [one(), one(operation="b"), one()]
        assert submit_many(conn, CLASS, jobs) == [True, True, False]
        conn.commit()
        assert submit_many(conn, CLASS, jobs) == [False] * 3
        before = rows(conn)
        for other in (
            [*jobs, one(args={"n": 2})],
            [Submission("t", "c", {}), Submission("t", "c", {"n": 1})],
        ):
            with pytest.raises(OperationConflict, match=f"job {len(other)} ") as refused:
                submit_many(conn, CLASS, other)
            assert refused.value.field == "operation"
            conn.rollback()
        assert rows(conn) == before


def test_a_job_that_cannot_be_stored_is_named_and_nothing_of_its_batch_is_written(database18: Database) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tenant": ""}, "tenant"),
        ({"operation": "a "}, "operation"),
        ({"args": {"share": 0.5}}, "share"),
        ({"priority": 10**9}, "priority"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at"),
    ]
    with database18.connect() as conn:
        for part, field in wrong:
            with pytest.raises(InvalidInput, match="job 2:") as refused:
                submit_many(conn, CLASS, [one(), one(**part)])
            assert field in str(refused.value.field)
            conn.rollback()
        far = datetime.now(UTC) + timedelta(days=4000)
        with pytest.raises(InvalidInput, match="job 2 ") as refused:
            submit_many(conn, CLASS, [one(), one(operation="b", run_at=far)])
        assert refused.value.field == "run_at"
        conn.rollback()
        assert rows(conn) == []
        assert submit_many(conn, CLASS, []) == []
    with database18.connect(autocommit=True) as conn, pytest.raises(WrongTransaction):
        submit_many(conn, CLASS, [one()])


def test_the_database_itself_refuses_what_another_client_may_send(database18: Database) -> None:
    call = "SELECT fencepost.submit_many('report.analyse', %s::text[], %s::text[], %s::bytea[], %s::text[], %s::uuid[], %s::timestamptz[], %s::int[])"
    good: list[list[Any]] = [["t"], ["o"], [b"{}"], ["ref:x"], [None], [None], [None]]
    with database18.connect(autocommit=True) as conn:
        assert conn.execute(call, good).fetchone() == ([True],)
        for index, value, field in (
            (0, [None], "tenant"),
            (1, [""], "operation"),
            (2, [None], "args"),
            (2, [b"x" * 1048577], "args"),
            (3, ["x"], "binding"),
            (6, [2147483646], "priority"),
            (6, [], "jobs"),
        ):
            bad = [*good[:index], value, *good[index + 1 :]]
            with pytest.raises(InvalidInput) as refused:
                conn.execute(call, bad)
            assert refused.value.field == field
        with pytest.raises(InvalidInput) as refused:
            conn.execute(call, [[v[0]] * 1001 for v in good])
        assert refused.value.field == "jobs"


def test_the_database_itself_bounds_the_priority_of_a_single_job(database18: Database) -> None:
    call = "SELECT fencepost.submit('t', %s, 'report.analyse', '{}', 'ref:x', NULL, NULL, %s)"
    with database18.connect(autocommit=True) as conn:
        for operation, priority in (("most", 1_000_000), ("least", -1_000_000)):
            assert conn.execute(call, (operation, priority)).fetchone() == (True,)
        for priority in (1_000_001, -1_000_001, 2_147_483_646):
            with pytest.raises(InvalidInput) as refused:
                conn.execute(call, ("beyond", priority))
            assert refused.value.field == "priority" and refused.value.hint
        assert [row[1] for row in rows(conn)] == ["least", "most"]


def test_a_long_bulk_goes_in_batches_and_is_claimed(database18: Database) -> None:
    with database18.connect() as conn:
        many = (Submission("t", f"o{n:05}", {"n": n}) for n in range(2501))
        assert submit_many(conn, CLASS, many) == [True] * 2501
        big = "x" * 1_000_000
        assert submit_many(conn, CLASS, (Submission("t", f"p{n}", {"text": big}) for n in range(9))) == [True] * 9
        conn.commit()
    with database18.connect(autocommit=True) as conn:
        register_class(conn, JobClassPolicy(as_class(CLASS)))
        assert [job.operation for job in claim(conn, "w", [CLASS], 3)] == ["o00000", "o00001", "o00002"]


def test_a_bulk_waits_for_others_in_the_order_of_operations_and_never_in_a_circle(database18: Database) -> None:
    """It was given the second job first: while it waits for the first one, it must not hold the second."""
    with two(database18) as (auto, manual):
        assert submit(manual, CLASS, tenant="t", operation="a", args={"n": 1})

        def bulk(conn: Conn) -> list[bool]:
            with conn.transaction():
                return submit_many(conn, CLASS, [one(operation="b"), one(operation="a")])

        behind = Background(database18, bulk)
        waiting(auto, behind.pid)
        assert submit(manual, CLASS, tenant="t", operation="b", args={"n": 1})
        manual.commit()
        assert behind.outcome() == [False, False]
        assert [row[1] for row in rows(auto)] == ["a", "b"]


def test_the_asynchronous_form_is_the_same(database18: Database) -> None:
    async def main() -> None:
        async with await connect_async(database18.dsn) as conn:
            assert await submit_many(conn, CLASS, [one()]) == [True]
            assert await submit_many(conn, CLASS, [one()]) == [False]
            await conn.rollback()
        async with await connect_async(database18.dsn, autocommit=True) as conn:
            with pytest.raises(WrongTransaction):
                await submit_many(conn, CLASS, [one()])

    asyncio.run(main())
