"""A handler that names a model gets args of that model, and args that do not fit never reach it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from fencepost.jobs.claim import Job, JobClassPolicy, register_class
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Event, Private
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import CLASS, column
from support.workers import QUICK, becomes, running


class Mail(BaseModel):
    to: str
    copies: int = 1


class Accepted(Event, type="typed.accepted", version=1):
    document: str
    note: Private[str] = ""


def test_args_arrive_as_the_model_and_what_does_not_fit_is_poison_without_a_call(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    seen: list[tuple[str, int]] = []

    @worker.job("a.sync", **QUICK)
    def sync(ctx: Context, job: Job, mail: Mail) -> None:
        seen.append((mail.to, mail.copies))

    @worker.job("an.async", **QUICK)
    async def asynchronous(ctx: AsyncContext, job: Job, mail: Mail) -> None:
        await asyncio.sleep(0)
        seen.append((mail.to, mail.copies))

    with database18.connect(autocommit=True) as conn:
        with conn.transaction():
            for name in worker.classes:
                register_class(conn, JobClassPolicy(as_class(name)))
                submit(conn, name, tenant="t", operation=f"{name}-good", args=Mail(to="a", copies=2))
                submit(conn, name, tenant="t", operation=f"{name}-bad", args={"to": "a", "copies": "secret"})
        with running(worker, database18):
            for name in worker.classes:
                becomes(conn, "done", f"{name}-good", job_class=name)
                becomes(conn, "poison", f"{name}-bad", job_class=name)
        for name in worker.classes:
            found = [column(conn, each, f"{name}-bad") for each in ("reason", "detail", "attempts")]
            assert found == ["invalid_args", "args.copies", 1]
    assert seen == [("a", 2)] * 2
    assert "secret" not in caplog.text


def test_an_event_that_was_handed_over_arrives_as_that_event(database18: Database) -> None:
    worker = Worker()
    seen: list[Accepted] = []

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job, event: Accepted) -> None:
        seen.append(event)

    event = Accepted(tenant="t", operation="op-1", document="d", note="n")
    with database18.connect(autocommit=True) as conn:
        with conn.transaction():
            register_class(conn, JobClassPolicy(as_class(CLASS)))
            submit(conn, CLASS, tenant="t", operation="op-1", args=event)
        with running(worker, database18):
            becomes(conn, "done", "op-1")
    assert [(each.tenant, each.operation, each.document, each.note) for each in seen] == [("t", "op-1", "d", "n")]


def test_a_handler_whose_third_parameter_is_no_model_is_caseswhen_it_is_registered() -> None:
    def two(ctx: Context, job: Job) -> None: ...
    def three(ctx: Context, job: Job, mail: Mail) -> None: ...
    def number(ctx: Context, job: Job, mail: int) -> None: ...
    def four(ctx: Context, job: Job, mail: Mail, more: Mail) -> None: ...

    untyped: Any = lambda ctx, job, mail: None  # pyright: ignore
    cases: list[tuple[Any, str]] = [(untyped, "args"), (number, "args"), (four, "handler")]
    worker = Worker()
    worker.job("two")(two)
    worker.job("three")(three)
    for index, (handler, field) in enumerate(cases):
        with pytest.raises(ConfigError) as refused:
            worker.job(f"a.class{index}")(handler)
        assert refused.value.field == field
    assert worker.classes == ("two", "three")
