"""`fencepost parked` and `relay destinations`: what was set aside and why, and the operator's acts with their refusals."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from fencepost.relay import outbox
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, ParkReason, Route
from fencepost.schemas.event import Event
from support.command_line import Fencepost, Result
from support.database import Database
from support.memory_broker import MemoryBroker
from support.relays import destination, relay_once

SECRET = "secret-content"
WHY = ("--reason-text", "looked into it", "--actor", "ann")


class Filed(Event, type="operate.filed", version=1):
    text: str = SECRET


class Lost(Event, type="lost.found", version=1):
    text: str = SECRET


@pytest.fixture
def parked(database: Database) -> Database:
    """One key with a refused event and one behind it, another tenant's refused one, and one without a route."""
    reasons = {"big": ParkReason.TOO_LARGE, "gone": ParkReason.NO_SUCH_TOPIC}
    broker = MemoryBroker(
        lambda row: Outcome(Answer.REFUSED, reasons[row.operation]) if row.operation in reasons else CONFIRMED
    )
    with database.connect() as conn:
        outbox.enqueue(conn, Filed(tenant="acme", operation="big", ordering_key="k"))
        outbox.enqueue(conn, Filed(tenant="acme", operation="after", ordering_key="k"))
        outbox.enqueue(conn, Filed(tenant="other", operation="gone"))
        outbox.enqueue(conn, Lost(tenant="acme", operation="unrouted"))
    relay_once(database, destination(broker, "reports", [Route("operate.*", "here")]))
    relay_once(database, NoRoute())
    return database


def rows(done: Result) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def operations(done: Result) -> list[str]:
    return [r["operation"] for r in rows(done)]


def seq_of(database: Database, operation: str) -> str:
    with database.connect() as conn:
        row = conn.execute("SELECT seq FROM fencepost.outbox WHERE operation = %(o)s", {"o": operation}).fetchone()
    assert row is not None
    return str(row[0])


def decisions(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute(
            "SELECT kind, actor, reason, operation, verdict FROM fencepost.decision WHERE kind <> 'routes' ORDER BY id"
        ).fetchall()


def test_parked_events_are_listed_by_tenant_type_reason_destination_and_age(
    parked: Database, fencepost: Fencepost
) -> None:
    def listed(*filters: str) -> list[str]:
        return operations(fencepost(parked, "parked", "list", "--json", *filters))

    assert listed() == ["unrouted", "big", "after", "gone"]
    assert listed("--tenant", "other") == ["gone"]
    assert listed("--type", "lost.found") == ["unrouted"]
    assert listed("--reason", "behind") == ["after"]
    assert listed("--destination", "-") == ["unrouted"]
    assert listed("--older-than", "1h") == []
    with parked.connect() as conn:
        conn.execute("UPDATE fencepost.parked SET parked_at = parked_at - interval '2 hours' WHERE operation = 'gone'")
    assert listed("--older-than", "90m") == ["gone"]
    assert listed("--limit", "2") == ["unrouted", "big"]
    assert fencepost(parked, "parked", "list", "--tenant", "nobody").out == "parked: none\n"


def test_no_command_prints_a_payload(parked: Database, fencepost: Fencepost) -> None:
    big = ("--destination", "reports", "--seq", seq_of(parked, "big"))
    for words in (
        ("list",),
        ("list", "--json"),
        ("show", *big),
        ("show", *big, "--json"),
        ("export",),
        ("retry", "--all", "--dry-run", *WHY),
    ):
        done = fencepost(parked, "parked", *words)
        assert "big" in done.out
        assert SECRET not in done.out + done.err
        assert base64.b64encode(SECRET.encode()).decode()[:12] not in done.out


def test_one_event_is_shown_with_its_place_and_what_was_decided(parked: Database, fencepost: Fencepost) -> None:
    after = ("--destination", "reports", "--seq", seq_of(parked, "after"))
    assert fencepost(parked, "parked", "retry", *after, *WHY).code == 0

    shown = json.loads(fencepost(parked, "parked", "show", *after, "--json").out)
    assert (shown["operation"], shown["reason"], shown["before_it"]) == ("after", "behind", 1)
    assert shown["bytes"] > len(SECRET) and "payload" not in shown
    assert [(d["actor"], d["reason"], d["verdict"]) for d in shown["decisions"]] == [("ann", "looked into it", "due")]

    refused = fencepost(parked, "parked", "show", "--destination", "reports", "--seq", "999")
    assert refused.code == 1 and "no such parked event [seq]" in refused.line


def test_retry_marks_due_and_tells_what_is_refused(parked: Database, fencepost: Fencepost) -> None:
    done = fencepost(parked, "parked", "retry", "--tenant", "acme", "--json", *WHY)
    assert done.code == 1
    found = {r["operation"]: r["result"] for r in json.loads(done.out)}
    assert found["big"] == found["after"] == "due"
    assert found["unrouted"].startswith("refused: no destination has a route for lost.found [type]")
    assert [d[3:] for d in decisions(parked)] == [("big", "due"), ("after", "due")]

    broker = MemoryBroker()
    relay_once(parked, destination(broker, "reports", [Route("operate.*", "here")]))
    assert [o for o in broker.operations() if o != "gone"] == ["big", "after"]
    left = operations(fencepost(parked, "parked", "list", "--json"))
    assert "unrouted" in left and not {"big", "after"} & set(left)


def test_what_has_no_route_goes_where_there_is_one_now(parked: Database, fencepost: Fencepost) -> None:
    broker = MemoryBroker()
    everything = [Route("operate.*", "here"), Route("lost.*", "there")]
    with parked.connect() as conn:
        Destination("reports", "kafka", everything, lambda _: broker, accept_routes=True).register(conn)
    done = fencepost(parked, "parked", "retry", "--reason", "no_route", "--json", *WHY)
    assert [r["result"] for r in rows(done)] == ["moved to reports"]
    relay_once(parked, destination(broker, "reports", everything))
    assert "unrouted" in broker.operations()


def test_skip_gives_an_event_up_and_frees_what_waited_behind_it(parked: Database, fencepost: Fencepost) -> None:
    big = ("--destination", "reports", "--seq", seq_of(parked, "big"))
    done = fencepost(parked, "parked", "skip", *big, *WHY)
    assert done.code == 0 and "skipped" in done.out
    assert decisions(parked) == [("skip_parked", "ann", "looked into it", "big", "skipped")]
    broker = MemoryBroker()
    relay_once(parked, destination(broker, "reports", [Route("operate.*", "here")]))
    assert [o for o in broker.operations() if o != "gone"] == ["after"]
    again = fencepost(parked, "parked", "skip", *big, *WHY)
    assert again.code == 1 and "not parked" in again.line and "[seq]" in again.line


@pytest.mark.parametrize("command", ["retry", "skip"])
def test_a_dry_run_says_what_would_happen_and_changes_nothing(
    parked: Database, fencepost: Fencepost, command: str
) -> None:
    def standing() -> list[tuple[Any, ...]]:
        with parked.connect() as conn:
            return conn.execute("SELECT destination, seq, next_try_at FROM fencepost.parked ORDER BY 1, 2").fetchall()

    before = standing()
    done = fencepost(parked, "parked", command, "--reason", "too_large", "--dry-run", *WHY)
    assert done.code == 0 and done.out.startswith("dry run, nothing was changed")
    assert ("due" if command == "retry" else "skipped") in done.out
    assert standing() == before and decisions(parked) == []
    assert fencepost(parked, "parked", command, "--reason", "too_large", *WHY).code == 0
    assert standing() != before and len(decisions(parked)) == 1


@pytest.mark.parametrize("command", ["retry", "skip"])
def test_acts_without_a_choice_a_reason_or_a_sane_word_are_refused(
    parked: Database, fencepost: Fencepost, command: str
) -> None:
    one = ("--destination", "reports", "--seq", seq_of(parked, "big"))
    assert fencepost(parked, "parked", command, *WHY).code == 2
    assert fencepost(parked, "parked", command, *one).code == 2
    assert fencepost(parked, "parked", command, "--reason", "because", *WHY).code == 2
    age = fencepost(parked, "parked", command, "--older-than", "soon", *WHY)
    assert age.code == 1 and "[older-than]" in age.line
    unknown = fencepost(parked, "parked", command, "--seq", "998", "--seq", "999", *WHY)
    assert unknown.code == 1 and "not parked: 998, 999 [seq]" in unknown.line
    nobody = fencepost(parked, "parked", command, *one, "--reason-text", "why", "--actor", " padded")
    assert nobody.code == 1 and "[actor]" in nobody.line
    assert decisions(parked) == []
    assert fencepost(parked, "parked", command, "--tenant", "nobody", *WHY).code == 0
    assert fencepost(parked, "parked", command, *one, *WHY).code == 0


def test_export_writes_lines_and_payloads_only_into_a_new_private_file(
    parked: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    done = fencepost(parked, "parked", "export", "--tenant", "acme")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [r["operation"] for r in lines] == ["unrouted", "big", "after"]
    assert all("payload" not in " ".join(r) for r in lines)

    target = tmp_path / "payloads.jsonl"
    done = fencepost(parked, "parked", "export", "--reason", "too_large", "--with-payload", str(target))
    assert (done.code, SECRET in done.out) == (0, False)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    (line,) = [json.loads(text) for text in target.read_text().splitlines()]
    assert line["operation"] == "big" and json.loads(base64.b64decode(line["payload_base64"]))["text"] == SECRET

    again = fencepost(parked, "parked", "export", "--with-payload", str(target))
    assert again.code == 1 and "[with-payload]" in again.line
    assert len(target.read_text().splitlines()) == 1


def test_a_disarmed_database_takes_no_act_and_can_be_looked_at(parked: Database, fencepost: Fencepost) -> None:
    with parked.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
    for command in ("retry", "skip"):
        done = fencepost(parked, "parked", command, "--all", *WHY)
        assert done.code == 1 and "[armed]" in done.line
    assert len(operations(fencepost(parked, "parked", "list", "--json"))) == 4
    assert fencepost(parked, "migrate").code == 0
    assert fencepost(parked, "parked", "skip", "--all", *WHY).code == 0


def test_destinations_are_listed_with_their_routes_and_removed_when_they_are_done(
    parked: Database, fencepost: Fencepost
) -> None:
    (row,) = rows(fencepost(parked, "relay", "destinations", "--json"))
    assert (row["destination"], row["kind"], row["on_refusal"], row["relays"]) == ("reports", "kafka", "block", 0)
    assert row["routes"][0]["match"] == "operate.*" and row["unsent"] == 0
    assert "operate.* -> here" in fencepost(parked, "relay", "destinations", "list").out

    remove = ("relay", "destinations", "remove", "reports", "--reason", "moved", "--actor", "ann")
    refused = fencepost(parked, *remove)
    assert refused.code == 1 and "0 events are unsent and 3 are parked [lose]" in refused.line
    unknown = fencepost(parked, "relay", "destinations", "remove", "nobody", "--reason", "moved")
    assert unknown.code == 1 and "[destination]" in unknown.line
    assert fencepost(parked, "relay", "destinations", "remove", "reports").code == 2
    done = fencepost(parked, *remove, "--yes-lose")
    assert (done.code, done.out) == (0, "destination reports is removed; lost: 0 unsent, 3 parked\n")
    assert decisions(parked)[0][:3] == ("remove_destination", "ann", "moved")
    assert rows(fencepost(parked, "relay", "destinations", "--json")) == []
