"""A job is scheduled in the caller's commit, under the operation's identity, or refused by the name of the field."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.rows import dict_row

from fencepost.consumer import handoff
from fencepost.schemas.content import JsonValue
from fencepost.schemas.errors import InvalidInput, OperationConflict, WrongTransaction
from support.database import Database
from support.deliveries import Submitted, envelope


def jobs(database: Database) -> list[dict[str, Any]]:
    with database.connect() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM fencepost.job ORDER BY class, operation").fetchall()


def test_the_same_job_again_is_the_same_and_another_meaning_is_a_conflict(domain: Database) -> None:
    event = Submitted(tenant="acme", operation="op-1", document="a")
    annotated = Submitted(tenant="acme", operation="op-1", document="a", note="private")
    other = Submitted(tenant="acme", operation="op-1", document="b")
    with domain.connect() as conn:
        assert handoff.submit(conn, "report.analyse", event) is True
        assert handoff.submit(conn, "report.analyse", event) is False
        assert handoff.submit(conn, "report.analyse", annotated) is False, "private members have no meaning"
        assert handoff.submit(conn, "report.index", other) is True
        assert handoff.submit(conn, "report.analyse", other, operation="op-1/part-2") is True
        conn.commit()
        with pytest.raises(OperationConflict):
            handoff.submit(conn, "report.analyse", other)
    assert [(j["class"], j["operation"]) for j in jobs(domain)] == [
        ("report.analyse", "op-1"),
        ("report.analyse", "op-1/part-2"),
        ("report.index", "op-1"),
    ]


def test_the_job_knows_the_event_it_came_from_and_when_it_may_run(domain: Database) -> None:
    sent = envelope()
    later = datetime.now(UTC) + timedelta(hours=1)
    with domain.connect() as conn:
        handoff.submit(conn, "report.analyse", Submitted.parse(sent), run_at=later, priority=-2)
    (job,) = jobs(domain)
    assert (job["source_event"], job["run_at"], job["priority"], job["exec"]) == (sent.id, later, -2, "queued")


def test_a_job_without_an_event_needs_its_identity(domain: Database) -> None:
    args: dict[str, JsonValue] = {"n": 1}
    with domain.connect() as conn:
        assert handoff.submit(conn, "report.analyse", args, tenant="acme", operation="op-1")
        for missing in ("tenant", "operation"):
            given: dict[str, Any] = {"tenant": "acme", "operation": "op-2", missing: None}
            with pytest.raises(InvalidInput) as refused:
                handoff.submit(conn, "report.analyse", args, **given)
            assert refused.value.field == missing


def test_what_a_job_cannot_be_is_refused_before_anything_is_sent(domain: Database) -> None:
    event = Submitted(tenant="acme", operation="op-1", document="a")
    bad: list[tuple[str, dict[str, Any]]] = [
        ("class", {"job_class": "Not A Class"}),
        ("run_at", {"run_at": datetime(2030, 1, 1)}),
        ("priority", {"priority": 2**31}),
        ("priority", {"priority": True}),
        ("tenant", {"tenant": "someone-else"}),
        ("operation", {"operation": ""}),
    ]
    submit: Callable[..., bool] = handoff.submit
    with domain.connect() as conn:
        assert submit(conn, "report.analyse", event)
        for field, change in bad:
            with pytest.raises(InvalidInput) as refused:
                submit(conn, **{"job_class": "report.analyse", "args": event, **change})
            assert refused.value.field == field
        conn.execute("SELECT 1")  # The transaction is as usable as before.
    assert len(jobs(domain)) == 1


def test_autocommit_is_refused_outside_a_transaction_and_fine_inside_one(domain: Database) -> None:
    event = Submitted(tenant="acme", operation="op-1", document="a")
    with domain.connect(autocommit=True) as conn:
        with conn.transaction():
            assert handoff.submit(conn, "report.analyse", event)
        with pytest.raises(WrongTransaction) as refused:
            handoff.submit(conn, "report.index", event)
    assert refused.value.field == "autocommit"
    assert [j["class"] for j in jobs(domain)] == ["report.analyse"]
