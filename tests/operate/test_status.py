"""`fencepost status`: every state with its age, and exactly the events that a destination was not sent yet."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from fencepost.jobs.submit import submit
from fencepost.relay import outbox
from fencepost.schemas.event import Event
from support.command_line import Fencepost
from support.database import Database
from support.memory_broker import Lossy, MemoryBroker
from support.relays import BRISK, accepted, relay_once, value
from support.relays import destination as in_memory
from support.services import Kafka, unique

PATIENT = replace(BRISK, confirm=10.0, lease=30.0)


class Noted(Event, type="operate.noted", version=1):
    text: str


def note(conn: psycopg.Connection[Any], operation: str) -> None:
    outbox.enqueue(conn, Noted(tenant="acme", operation=operation, text="secret-content"))


def noted(database: Database, *operations: str) -> None:
    for operation in operations:
        with database.connect() as conn:
            note(conn, operation)


def destination(kafka: Kafka) -> str:
    routes = [{"match": "operate.*", "to": kafka.topic()}]
    return json.dumps([{"name": unique("d")[:20], "kind": "kafka", "address": kafka.bootstrap, "routes": routes}])


def test_states_are_counted_by_tenant_and_kind_without_payloads(database: Database, fencepost: Fencepost) -> None:
    empty = fencepost(database, "status")
    assert empty.code == 0
    assert empty.out.splitlines()[:2] == ["armed", "states: nothing yet"]

    with database.connect() as conn:
        for number in range(3):
            submit(conn, "report.make", tenant="acme", operation=f"op-{number}", args={"text": "secret-content"})
        submit(conn, "report.make", tenant="other", operation="op-0", args={"text": "secret-content"})
    noted(database, "event-1", "event-2")
    plain = fencepost(database, "status")
    assert plain.code == 0
    assert "secret-content" not in plain.out
    assert "2 events wait for a first destination" in plain.out

    found = json.loads(fencepost(database, "status", "--json").out)
    assert found["armed"] is True
    assert {(s["axis"], s["state"], s["tenant"], s["kind"]): s["count"] for s in found["states"]} == {
        ("job", "queued", "acme", "report.make"): 3,
        ("job", "queued", "other", "report.make"): 1,
    }
    assert all(s["age_seconds"] >= 0 for s in found["states"])
    assert found["waiting_for_a_destination"] == 2


def test_disarmed_database_says_so(database: Database, fencepost: Fencepost) -> None:
    assert fencepost(database, "status").out.startswith("armed")
    with database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")

    assert fencepost(database, "status").out.startswith("DISARMED")


def test_backlog_counts_what_was_not_sent_late_commits_included(
    database18: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    destinations = destination(kafka)

    def unsent() -> tuple[int, bool]:
        found = json.loads(fencepost(database18, "status", "--json").out)["backlog"]
        assert len(found) == 1
        return found[0]["waiting"], found[0]["oldest_seconds"] is not None

    def relay() -> str:
        done = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=destinations)
        assert done.code == 0, done.err
        return done.out.splitlines()[-1].rpartition(", sent again ")[0]

    noted(database18, "a", "b", "c")
    assert relay() == "published 3, parked 0"
    assert unsent() == (0, False)

    noted(database18, "d", "e")
    assert unsent() == (2, True)
    with database18.connect() as late:
        note(late, "late")
        noted(database18, "f")
        # What is not committed is not counted; what was committed around it is sent without waiting for it.
        assert unsent() == (3, True)
        assert relay() == "published 3, parked 0"
        assert unsent() == (0, False)
    assert unsent() == (1, True)
    assert relay() == "published 1, parked 0"
    assert unsent() == (0, False)


def test_status_counts_what_was_overtaken_within_the_replay_window_and_older_records_go(
    database18: Database, fencepost: Fencepost
) -> None:
    accepted(database18, "a-1", "a-2", key="a")
    assert "overtaken" not in fencepost(database18, "status").out
    relay_once(database18, in_memory(MemoryBroker(Lossy("a-1"), withholding=False)), pace=PATIENT)

    (line,) = [line for line in fencepost(database18, "status").out.splitlines() if "overtaken" in line]

    assert line.split()[:5] == ["event", "overtaken", "acme", "relay.changed", "memory"]
    with database18.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.overtaken SET at = at - %s", [timedelta(days=8)])
        assert "overtaken" not in fencepost(database18, "status").out
        accepted(database18, "b-1", "b-2", key="b")
        relay_once(database18, in_memory(MemoryBroker(Lossy("b-1"), withholding=False)), pace=PATIENT)
        assert value(conn, "SELECT array_agg(operation) FROM fencepost.overtaken") == ["b-1"]


def test_backlog_of_a_destination_is_what_it_answers_for_and_looking_at_it_has_a_limit(
    database18: Database, kafka: Kafka, fencepost: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [{"match": "relay.*", "to": kafka.topic()}]
    everything = [{"match": "*", "to": kafka.topic()}]
    tables = [
        {"name": name, "kind": "kafka", "address": kafka.bootstrap, "routes": routes}
        for name, routes in (("other", other), ("everything", everything))
    ]
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=json.dumps(tables)).code == 0

    def unsent() -> dict[str, tuple[int, bool, bool]]:
        found = json.loads(fencepost(database18, "status", "--json").out)["backlog"]
        return {b["destination"]: (b["waiting"], b["more"], b["oldest_seconds"] is not None) for b in found}

    noted(database18, "a", "b", "c")
    assert unsent() == {"everything": (3, False, True), "other": (0, False, False)}
    accepted(database18, "d")
    assert unsent() == {"everything": (4, False, True), "other": (1, False, True)}

    monkeypatch.setattr("fencepost.relay.backlog.COUNT_MAX", 2)

    assert unsent()["everything"] == (2, True, True)
    plain = fencepost(database18, "status").out.splitlines()
    assert [">= 2" in line for line in plain if "everything" in line] == [True]
