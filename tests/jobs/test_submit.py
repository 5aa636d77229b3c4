"""A job is accepted in the caller's commit, once per tenant, operation and class, whatever the content means."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from itertools import product
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from fencepost.jobs.claim import claim
from fencepost.jobs.submit import submit
from fencepost.schemas.connect import connect_async
from fencepost.schemas.errors import InvalidInput, OperationConflict, UnknownClass, WrongTransaction
from support.database import Database
from support.jobs import CLASS, Conn, claimed, given, two


class Args(BaseModel):
    name: str
    amount: int


def rows(conn: Conn) -> list[Any]:
    return conn.execute("SELECT tenant, operation FROM fencepost.job ORDER BY 1, 2").fetchall()


def test_a_job_commits_with_the_callers_transaction_and_vanishes_with_it(database: Database) -> None:
    with two(database) as (auto, manual):
        assert submit(manual, CLASS, tenant="t", operation="op", args={"a": 1})
        manual.rollback()
        assert rows(auto) == []
        assert submit(manual, CLASS, tenant="t", operation="op", args={"a": 1})
        assert rows(auto) == []
        manual.commit()
        assert rows(auto) == [("t", "op")]


def test_autocommit_is_refused_outside_a_transaction_only(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        with pytest.raises(WrongTransaction) as refused:
            submit(conn, CLASS, tenant="t", operation="op", args={})
        assert refused.value.field == "autocommit" and rows(conn) == []
        with conn.transaction():
            assert submit(conn, CLASS, tenant="t", operation="op", args={})
        assert rows(conn) == [("t", "op")]


def test_the_asynchronous_form_is_the_same(database: Database) -> None:
    async def main() -> None:
        async with await connect_async(database.dsn) as conn:
            assert await submit(conn, CLASS, tenant="t", operation="op", args=Args(name="ü", amount=1))
            await conn.rollback()
            assert await submit(conn, CLASS, tenant="t", operation="op", args=Args(name="ü", amount=1))
            await conn.commit()
            assert not await submit(conn, CLASS, tenant="t", operation="op", args=Args(name="ü", amount=1))
            with pytest.raises(OperationConflict):
                await submit(conn, CLASS, tenant="t", operation="op", args=Args(name="ü", amount=2))
        async with await connect_async(database.dsn, autocommit=True) as conn:
            with pytest.raises(WrongTransaction):
                await submit(conn, CLASS, tenant="t", operation="op2", args={})
            async with conn.transaction():
                assert await submit(conn, CLASS, tenant="t", operation="op2", args={})

    asyncio.run(main())
    with database.connect(autocommit=True) as conn:
        assert rows(conn) == [("t", "op"), ("t", "op2")]


def test_the_same_job_again_is_the_same_job_and_another_meaning_a_conflict(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for args, new in (({"a": 1, "b": 2}, True), ({"b": 2, "a": 1}, False)):
            with conn.transaction():
                assert submit(conn, CLASS, tenant="t", operation="op", args=args) is new
        with pytest.raises(OperationConflict), conn.transaction():
            submit(conn, CLASS, tenant="t", operation="op", args={"a": 1, "b": 3})
        with conn.transaction():
            assert submit(conn, "report.other", tenant="t", operation="op", args={"a": 9})


def test_identities_that_only_look_alike_are_different_jobs(database: Database) -> None:
    """B22: no joined keys, no folding of case, no other tenant's conflict."""
    pairs = [("a", "b:c"), ("a:b", "c"), ("A", "b:c"), ("a", "B:c"), ("a b", "c"), ("a", "b c")]
    with database.connect(autocommit=True) as conn:
        for number, (tenant, operation) in enumerate(pairs):
            with conn.transaction():
                assert submit(conn, CLASS, tenant=tenant, operation=operation, args={"n": number})
        assert rows(conn) == sorted(pairs)
        given(conn, "control")
        assert len(claim(conn, "w", [CLASS], 100)) == len(pairs) + 1


REFUSED: list[tuple[str, Mapping[str, Any]]] = [
    ("tenant", {"tenant": ""}),
    ("tenant", {"tenant": " t"}),
    ("tenant", {"tenant": "t "}),
    ("tenant", {"tenant": "a\x00b"}),
    ("tenant", {"tenant": None}),
    ("operation", {"operation": "x" * 201}),
    ("class", {"job_class": "Not A Name"}),
    ("args.price", {"args": {"price": 1.5}}),
    ("args.when", {"args": {"when": datetime(2030, 1, 1)}}),
    ("args", {"args": [1]}),
    ("run_at", {"run_at": datetime(2030, 1, 1)}),
    ("run_at", {"run_at": datetime(9999, 1, 1, tzinfo=UTC)}),
    ("priority", {"priority": 10**9}),
    ("priority", {"priority": True}),
]


def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_written(database: Database) -> None:
    with database.connect() as conn:
        good: dict[str, Any] = {"job_class": CLASS, "tenant": "t", "operation": "op", "args": {}}
        assert submit(conn, **good)
        conn.rollback()
        for field, changes in REFUSED:
            with pytest.raises(InvalidInput) as refused:
                submit(conn, **(good | dict(changes)))
            assert refused.value.field == field
            conn.rollback()
        assert rows(conn) == []


def test_the_database_bounds_priorities_on_both_sides_whoever_calls(database18: Database) -> None:
    call = "SELECT fencepost.submit('t', %(o)s, %(c)s, '{}', 'ref:x', NULL, NULL, %(p)s)"
    with database18.connect() as conn:
        for priority in (-1_000_000, 1_000_000):
            assert conn.execute(call, {"o": f"op{priority}", "c": CLASS, "p": priority}).fetchone() == (True,)
        for priority in (-1_000_001, 1_000_001):
            with pytest.raises(InvalidInput) as refused, conn.transaction():
                conn.execute(call, {"o": "op", "c": CLASS, "p": priority})
            assert refused.value.field == "priority"


def test_what_differs_in_one_part_of_its_name_is_no_conflict(database18: Database) -> None:
    jobs = list(product(("m", "a", "z"), ("m.m", "a.a", "z.z"), ("m", "a", "z")))
    with database18.connect() as conn:
        for again in (False, True):
            for tenant, job_class, operation in jobs:
                args = {"of": [tenant, job_class, operation]}
                assert submit(conn, job_class, tenant=tenant, operation=operation, args=args) is not again
        with pytest.raises(OperationConflict):
            submit(conn, "m.m", tenant="m", operation="m", args={"of": ["a", "m.m", "m"]})


def test_run_at_means_the_same_instant_in_every_zone_and_is_judged_by_the_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    with database.connect(autocommit=True, options="-c timezone=Pacific/Kiritimati") as conn:
        given(conn, "now")
        soon = datetime.now(UTC) + timedelta(hours=1)
        for name, zone in (("east", timezone(timedelta(hours=14))), ("west", timezone(timedelta(hours=-12)))):
            with conn.transaction():
                submit(conn, CLASS, tenant="t", operation=name, args={}, run_at=soon.astimezone(zone))
        assert conn.execute("SELECT count(DISTINCT run_at) FROM fencepost.job WHERE operation <> 'now'").fetchone() == (
            1,
        )
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["now"]
        conn.execute("UPDATE fencepost.job SET run_at = run_at - interval '2 hours' WHERE operation = 'east'")
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["east"]


def test_args_come_back_as_they_went_in(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "control")
        with conn.transaction():
            submit(conn, CLASS, tenant="t", operation="op", args=Args(name="ünï", amount=2))
        job = claimed(conn, "op")
        assert job.json() == {"name": "ünï", "amount": 2} and job.parse(Args) == Args(name="ünï", amount=2)
        assert "ünï" not in repr(job)

        class Other(BaseModel):
            amount: str

        with pytest.raises(InvalidInput) as refused:
            job.parse(Other)
        assert refused.value.field == "args.amount" and "2" not in str(refused.value)


def test_a_class_must_be_registered_before_it_is_claimed(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        with pytest.raises(UnknownClass):
            claim(conn, "w", [CLASS, "report.never"], 1)
        assert len(claim(conn, "w", [CLASS], 1)) == 1


def test_concurrent_submissions_of_one_job_make_one(database: Database) -> None:
    with database.connect() as one, database.connect() as other:
        assert submit(one, CLASS, tenant="t", operation="op", args={})
        other.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            submit(other, CLASS, tenant="t", operation="op", args={})
        other.rollback()
        one.commit()
        assert not submit(other, CLASS, tenant="t", operation="op", args={})
