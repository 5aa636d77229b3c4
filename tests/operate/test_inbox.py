"""`fencepost inbox`: what is remembered, for how long, and what a purge would forget; doctor says where that is wrong."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer.inbox import inbox
from support.command_line import Fencepost
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka

WHY = ("--reason", "a test", "--actor", "ann")


@inbox(consumer="reports")
def reports(tx: Connection[Any], event: Submitted) -> None:
    """Without any work."""


@pytest.fixture
def remembered(database: Database) -> Database:
    """One operation of a month ago and one of today, in two tenants."""
    for number, (tenant, days) in enumerate((("acme", 30), ("rival", 0))):
        sent = envelope(tenant=tenant, operation=f"op-{number}", time=datetime.now(UTC) - timedelta(days=days))
        reports.handle(database.dsn, from_kafka(sent, number))
    with database.connect() as conn:
        conn.execute("UPDATE fencepost.reservation SET reserved_at = event_time, last_at = event_time")
    return database


def test_what_was_handled_is_listed_by_its_key(remembered: Database, fencepost: Fencepost) -> None:
    def listed(*filters: str) -> list[str]:
        return [r["operation"] for r in json.loads(fencepost(remembered, "inbox", "list", "--json", *filters).out)]

    assert listed() == ["op-1", "op-0"]
    assert listed("--tenant", "acme") == ["op-0"]
    assert listed("--operation", "op-1", "--consumer", "reports", "--type", "test.submitted") == ["op-1"]
    assert listed("--consumer", "other") == []
    assert listed("--limit", "1") == ["op-1"]
    assert "op-0" in fencepost(remembered, "inbox", "list").out


def test_a_window_is_declared_for_one_consumer_with_a_reason_and_shown(
    remembered: Database, fencepost: Fencepost
) -> None:
    assert "every consumer remembers for ever" in fencepost(remembered, "inbox", "retention").out
    for words, field in (
        (("--replay-window", "7d", *WHY), "consumer"),
        (("--consumer", "reports", "--replay-window", "7d"), "reason"),
        (("--consumer", "reports", "--replay-window", "soon", *WHY), "replay_window"),
        (("--consumer", "reports", "--replay-window", "7d", "--forever", *WHY), "replay_window"),
    ):
        refused = fencepost(remembered, "inbox", "retention", *words)
        assert refused.code == 1 and f"[{field}]" in refused.line, refused.err
    done = fencepost(
        remembered, "inbox", "retention", "--consumer", "reports", "--replay-window", "7d", "--keep-type", "paid.out",
        "--json", *WHY,
    )  # fmt: skip
    assert json.loads(done.out) == [
        {"consumer": "reports", "replay_window": 604800.0, "horizon": None, "forever": ["paid.out"]}
    ]
    gone = fencepost(
        remembered,
        "inbox",
        "retention",
        "--consumer",
        "reports",
        "--forever",
        "--keep-type-no-longer",
        "paid.out",
        *WHY,
    )
    assert gone.code == 0 and "for ever" in gone.out and "paid.out" not in gone.out
    with remembered.connect() as conn:
        found = conn.execute("SELECT actor, subject, verdict FROM fencepost.decision ORDER BY id").fetchall()
    assert found == [
        ("ann", "reports", "7 days"),
        ("ann", "reports", "paid.out for ever"),
        ("ann", "reports", "for ever"),
        ("ann", "reports", "paid.out like the others"),
    ]


def test_a_purge_forgets_what_its_dry_run_said(remembered: Database, fencepost: Fencepost) -> None:
    assert "no consumer has a replay window" in fencepost(remembered, "inbox", "purge").out
    fencepost(remembered, "inbox", "retention", "--consumer", "reports", "--replay-window", "7d", *WHY)

    said = json.loads(fencepost(remembered, "inbox", "purge", "--dry-run", "--json").out)
    assert [(r["consumer"], r["reservations"]) for r in said] == [("reports", 1)]
    with remembered.connect() as conn:
        assert conn.execute(
            "SELECT count(*), min(horizon)::text FROM fencepost.reservation, fencepost.consumer"
        ).fetchall() == [(2, "-infinity")]
    done = json.loads(fencepost(remembered, "inbox", "purge", "--json").out)
    assert [(r["consumer"], r["reservations"]) for r in done] == [("reports", 1)]
    assert json.loads(fencepost(remembered, "inbox", "purge", "--dry-run", "--json").out)[0]["reservations"] == 0
    shown = json.loads(fencepost(remembered, "inbox", "retention", "--json").out)
    assert shown[0]["horizon"] is not None


def test_doctor_refuses_a_window_shorter_than_what_the_broker_keeps(remembered: Database, fencepost: Fencepost) -> None:
    fencepost(remembered, "inbox", "retention", "--consumer", "reports", "--replay-window", "7d", *WHY)
    done = fencepost(remembered, "doctor")
    assert done.code == 0 and "ok    inbox " in done.out

    with remembered.connect() as conn:
        conn.execute("""SELECT fencepost.note_topics('reports', '{"events": 1209600000, "short": 1000}')""")
    refused = fencepost(remembered, "doctor")
    assert refused.code == 1
    assert (
        "events keeps events for 14 d, reports for 7 d: older redeliveries would be refused as before_horizon"
        in refused.out
    )
    assert "short" not in refused.out

    with remembered.connect() as conn:
        conn.execute("UPDATE fencepost.consumer_topic SET noted_at = noted_at - interval '31 days'")
    assert fencepost(remembered, "doctor").code == 0, "what was read a month ago says nothing about today"


def test_doctor_tells_of_conflicts_and_of_a_purge_that_nobody_makes(remembered: Database, fencepost: Fencepost) -> None:
    assert "ok    deadletters" in fencepost(remembered, "doctor").out
    reports.handle(remembered.dsn, from_kafka(envelope(tenant="acme", operation="op-0", document="b"), 7))
    found = fencepost(remembered, "doctor")
    assert (
        "warn  deadletters" in found.out and "dead letters: 1 conflict; see `fencepost deadletters list`" in found.out
    )
    assert "conflict" in fencepost(remembered, "status").out

    fencepost(remembered, "inbox", "retention", "--consumer", "reports", "--replay-window", "7d", *WHY)
    with remembered.connect() as conn:
        conn.execute("UPDATE fencepost.consumer SET changed_at = changed_at - interval '2 days'")
    assert "nobody purges for reports" in fencepost(remembered, "doctor").out
    fencepost(remembered, "inbox", "purge")
    assert "ok    inbox " in fencepost(remembered, "doctor").out
