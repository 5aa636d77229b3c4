"""`fencepost relay backfill` and `relay retention`: what they print, and what they refuse."""

import json

import pytest

from fencepost.relay import outbox
from fencepost.schemas.event import Event
from support.command_line import Fencepost
from support.database import Database
from support.services import Kafka

NOWHERE = json.dumps(
    [{"name": "here", "kind": "kafka", "address": "127.0.0.1:9", "routes": [{"match": "*", "to": "topic"}]}]
)


class Kept(Event, type="operate.kept", version=1):
    number: int


def test_a_range_is_counted_then_sent_again_and_told(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    with database18.connect() as conn:
        for number in range(1, 6):
            outbox.enqueue(conn, Kept(tenant="acme", operation=f"op-{number}", number=number))
    table = NOWHERE.replace("127.0.0.1:9", kafka.bootstrap).replace('"topic"', json.dumps(kafka.topic()))
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=table).code == 0
    command = ("relay", "backfill", "--destination", "here", "--from", "2", "--to", "4")

    dry = fencepost(database18, *command, "--dry-run", FENCEPOST_DESTINATIONS=table)
    assert (dry.code, dry.out) == (0, "3 events would be sent again to here, numbers 2 to 4\n")
    dry = fencepost(database18, *command, "--dry-run", "--json", FENCEPOST_DESTINATIONS=table)
    assert json.loads(dry.out) == {"destination": "here", "first": 2, "last": 4, "events": 3}

    done = fencepost(database18, *command, FENCEPOST_DESTINATIONS=table)
    assert (done.code, done.out) == (0, "sent 3 again to here, without a route 0, last number 4\n")
    done = fencepost(database18, *command, "--type", "other.type", "--json", FENCEPOST_DESTINATIONS=table)
    told = {"destination": "here", "sent": 0, "unrouted": 0, "last": 4, "complete": True, "refused": None}
    assert json.loads(done.out) == told


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--from", "yesterday"), "from"),
        (("--from", "2026-01-01T00:00:00"), "from"),
        (("--from", "0"), "from"),
        (("--from", "1", "--to", "x"), "to"),
        (("--from", "1"), "destination"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    database18: Database, fencepost: Fencepost, arguments: tuple[str, ...], field: str
) -> None:
    command = ("relay", "backfill", "--destination", "here", *arguments)
    done = fencepost(database18, *command, FENCEPOST_DESTINATIONS=NOWHERE)
    assert done.code == 1 and f"[{field}]" in done.line


def test_a_destination_without_settings_is_refused(database18: Database, fencepost: Fencepost) -> None:
    command = ("relay", "backfill", "--destination", "none", "--from", "1")
    done = fencepost(database18, *command, FENCEPOST_DESTINATIONS=NOWHERE)
    assert done.code == 2 and "[destination]" in done.line


def test_retention_is_shown_and_changed_with_a_reason(database18: Database, fencepost: Fencepost) -> None:
    shown = fencepost(database18, "relay", "retention", "--json")
    week = 7 * 86_400.0
    unchanged = {"retention": week, "replay_window": week, "recycled_up_to": 0, "recycled_before": None}
    assert json.loads(shown.out) == unchanged

    changing = ("relay", "retention", "--set", "12h", "--replay-window", "30d", "--actor", "ops")
    refused = fencepost(database18, *changing)
    assert refused.code == 1 and "[reason]" in refused.line
    done = fencepost(database18, *changing, "--reason", "disk", "--json")
    assert json.loads(done.out) == unchanged | {"retention": 12 * 3600.0, "replay_window": 30 * 86_400.0}


@pytest.mark.parametrize(("value", "field"), [("31d", "replay_window"), ("soon", "set"), ("999999999d", "retention")])
def test_a_retention_that_cannot_be_kept_is_refused(
    database18: Database, fencepost: Fencepost, value: str, field: str
) -> None:
    command = ("relay", "retention", "--actor", "ops", "--reason", "disk")
    assert fencepost(database18, *command, "--set", "1d").code == 0  # the allowed control
    done = fencepost(database18, *command, "--set", value)
    assert done.code == 1 and f"[{field}]" in done.line


def test_an_outbox_that_nobody_recycles_is_a_warning_of_the_doctor(database18: Database, fencepost: Fencepost) -> None:
    with database18.connect(autocommit=True) as conn:
        with conn.transaction():
            outbox.enqueue(conn, Kept(tenant="acme", operation="op", number=1))
        assert "ok    recycling" in fencepost(database18, "doctor").out
        conn.execute("UPDATE fencepost.installation SET created_at = created_at - interval '5 days'")
    done = fencepost(database18, "doctor")
    assert "warn  recycling" in done.out and "outbox_0 should have been recycled" in done.out
