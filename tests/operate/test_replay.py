"""`fencepost replay`: one line of what was done, or of what stands in the way; the exit code tells whether readers see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import Fencepost
from support.database import Database, Databases
from support.projections import accept, expected, newer_version, produce, projector, rows, sent
from support.roles import Roles, separated
from support.services import Kafka

APP = """
from fencepost.consumer import handoff
from fencepost.consumer.projection import projection
from support.projections import Paid, totals

@projection(name="totals", tables=("totals",))
def submits(tx, event: Paid) -> None:
    handoff.submit(tx, "report.analyse", event)

@projection(name="totals", tables=("totals",))
def fails(tx, event: Paid) -> None:
    raise ValueError(f"the amount is {event.amount}")

nothing = 5
"""


@pytest.fixture
def roles(databases18: Databases) -> Iterator[Roles]:
    with separated(databases18) as made:
        yield made


@pytest.fixture
def login(roles: Roles, tmp_path: Path) -> Database:
    """The projector's login, in a folder with the application."""
    (tmp_path / "replayed_app.py").write_text(APP)
    return Database(projector(roles), roles.database.state)


def test_a_topic_becomes_a_projection_and_the_outbox_does(
    roles: Roles, login: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    topic = kafka.topic()
    produce(kafka.bootstrap, topic, [sent(n) for n in range(1, 11)])
    destinations = json.dumps(
        [{"name": "d", "kind": "kafka", "address": kafka.bootstrap, "routes": [{"match": "*", "to": topic}],
          "options": {"linger.ms": "5"}}]
    )  # fmt: skip
    done = fencepost(
        login, "replay", "replayed_app:totals", "--topic", topic, "--from", "2", FENCEPOST_DESTINATIONS=destinations
    )
    assert done.code == 0, done.err
    assert "applied 8" in done.out and "swapped into schema public" in done.out
    with roles.database.connect() as conn:
        assert rows(conn) == expected(range(3, 11))
        accept(conn, *range(1, 6))
    again = fencepost(login, "replay", "replayed_app:totals", "--outbox")
    assert again.code == 1 and "--drop-old" in again.line
    again = fencepost(login, "replay", "replayed_app:totals", "--outbox", "--drop-old", "--json")
    assert again.code == 0 and json.loads(again.out)["applied"] == 5
    with roles.database.connect() as conn:
        assert rows(conn) == expected(range(1, 6))


def test_held_events_are_told_with_exit_code_1_and_nothing_is_swapped(
    roles: Roles, login: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    topic = kafka.topic()
    produce(kafka.bootstrap, topic, [sent(1), newer_version(2)])
    destinations = json.dumps(
        [{"name": "d", "kind": "kafka", "address": kafka.bootstrap, "routes": [{"match": "*", "to": topic}]}]
    )
    command = ("replay", "replayed_app:totals", "--topic", topic)
    done = fencepost(login, *command, FENCEPOST_DESTINATIONS=destinations)
    assert done.code == 1
    assert "held 1" in done.out and "totals_shadow.totals_held" in done.out
    assert fencepost(login, *command, "--accept-held", FENCEPOST_DESTINATIONS=destinations).code == 0


def test_a_handler_that_causes_something_or_fails_is_told_in_one_line_without_its_message(
    roles: Roles, login: Database, fencepost: Fencepost
) -> None:
    with roles.database.connect() as conn:
        accept(conn, 1)
    refused = fencepost(login, "replay", "replayed_app:submits", "--outbox")
    assert refused.code == 1
    assert "permission denied for function submit" in refused.line and roles.role("projector") in refused.line
    failed = fencepost(login, "replay", "replayed_app:fails", "--outbox")
    assert failed.code == 1 and "raised ValueError" in failed.line and "amount" not in failed.line
    assert fencepost(login, "replay", "replayed_app:totals", "--outbox").code == 0


def test_what_is_wrong_with_the_command_is_told_before_anything_is_made(
    roles: Roles, login: Database, fencepost: Fencepost
) -> None:
    for arguments, code, field in (
        (("replayed_app:nothing", "--outbox"), 2, "[target]"),
        (("replayed_app:totals",), 2, "[topic]"),
        (("replayed_app:totals", "--outbox", "--topic", "t"), 2, "[topic]"),
        (("replayed_app:totals", "--topic", "t"), 2, "[destination]"),
        (("replayed_app:totals", "--outbox", "--from", "yesterday"), 1, "[from]"),
        (("replayed_app:totals", "--outbox", "--to", "2026-01-01T00:00:00"), 1, "[to]"),
    ):
        done = fencepost(login, "replay", *arguments)
        assert (done.code, field in done.line) == (code, True), done.err
    other = fencepost(roles.database, "replay", "replayed_app:totals", "--outbox")
    assert other.code == 1 and "[login]" in other.line
    with roles.database.connect() as conn:
        assert conn.execute("SELECT to_regnamespace('totals_shadow')").fetchone() == (None,)
