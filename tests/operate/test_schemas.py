"""`fencepost schemas`: a breaking change of an event is refused before anybody can release it; documents are for others to use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from support.command_line import CLI, Result

EVENTS = """
from decimal import Decimal
from pydantic import BaseModel
from fencepost.schemas.event import Event, Private

class Line(BaseModel):
    price: Decimal

class Accepted(Event, type="report.accepted", version=1):
    "A document was submitted."
    submission_id: str
    lines: list[Line] = []
    note: Private[str | None] = None
"""
SECOND = """
class AcceptedTwo(Event, type="report.accepted", version=2):
    submission: str
"""
OTHER = """
class Paid(Event, type="invoice.paid", version=1):
    amount: Decimal
"""

Run = Callable[..., Result]


@pytest.fixture
def schemas(tmp_path: Path) -> Run:
    """Runs `fencepost schemas ...` in a folder with a module `events`; a process of its own, for the registry's sake."""

    def run(*arguments: str, **more: str) -> Result:
        env = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
        done = subprocess.run(
            [sys.executable, *CLI, "schemas", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**env, **more, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    (tmp_path / "events.py").write_text(EVENTS)
    return run


def test_a_breaking_change_is_refused_by_name_and_recorded_never(schemas: Run, tmp_path: Path) -> None:
    new = schemas("check", "events")
    assert (new.code, "report.accepted.v1 is new" in new.out) == (1, True)
    recorded = schemas("record", "events")
    assert (recorded.code, recorded.out) == (0, "recorded schemas/report.accepted.v1.json\n")
    good = schemas("check", "events")
    assert (good.code, good.out) == (0, "1 events are compatible with 1 recorded revisions\n")

    grown = EVENTS.replace("    note:", "    pages: int | None = None\n    note:") + SECOND
    (tmp_path / "events.py").write_text(grown)
    assert schemas("check", "events").code == 1, "what is released must be recorded"
    assert schemas("record", "events").code == 0
    assert schemas("check", "events").code == 0  # the allowed control: grown, and a new version with other members
    assert schemas("record", "events").out == "nothing to record\n"

    before = {path.name: path.read_bytes() for path in (tmp_path / "schemas").iterdir()}
    broken = grown.replace("submission_id: str", "submission: str").replace("Decimal\n\nclass", "int\n\nclass")
    (tmp_path / "events.py").write_text(broken)
    for command in ("check", "record"):
        refused = schemas(command, "events")
        assert refused.code == 1
        shown = [line.split() for line in refused.out.splitlines()]
        assert ["report.accepted.v1", "submission_id", "was", "removed", "(renamed", "to", "submission?)"] in [
            line[:-1] for line in shown
        ]
        assert "lines[].price" in refused.out and "changed its type" in refused.out
        assert "new version" in refused.out
    assert {path.name: path.read_bytes() for path in (tmp_path / "schemas").iterdir()} == before

    told = json.loads(schemas("check", "events", "--json").out)
    assert {(b["event"], b["field"]) for b in told["broken"]} == {
        ("report.accepted.v1", "submission_id"),
        ("report.accepted.v1", "submission"),
        ("report.accepted.v1", "lines[].price"),
    }


def test_a_wrong_module_or_folder_is_told_in_one_line(schemas: Run, tmp_path: Path) -> None:
    assert schemas("record", "events", "--snapshots", "kept").code == 0  # the allowed control
    missing = schemas("check", "nothing")
    assert (missing.code, "nothing cannot be imported" in missing.line) == (2, True)
    (tmp_path / "empty.py").write_text("")
    assert "no event is declared" in schemas("check", "empty").line
    (tmp_path / "kept" / "report.accepted.v1.json").write_text("{")
    damaged = schemas("check", "events", "--snapshots", "kept")
    assert (damaged.code, "report.accepted.v1.json is not a snapshot" in damaged.line) == (2, True)


def destinations() -> str:
    return json.dumps(
        [
            {
                "name": "reports",
                "kind": "kafka",
                "address": "user:hunter2@kafka.example:9092",
                "routes": [{"match": "report.*", "to": "reports"}],
                "mode": "structured",
            },
            {
                "name": "all",
                "kind": "rabbitmq",
                "address": "amqps://user:hunter2@rabbit.example/",
                "routes": [{"match": "invoice.*", "to": "money", "routing_key": "paid"}, {"match": "*", "to": "rest"}],
            },
        ]
    )


def exported(schemas: Run, tmp_path: Path, **more: str) -> dict[str, Any]:
    """The documents of an export by name."""
    (tmp_path / "events.py").write_text(EVENTS + SECOND + OTHER)
    assert schemas("record", "events", "--snapshots", "out").code == 0
    done = schemas("export", "events", "--to", "out", "--title", "Reports", "--version", "1.2.3", **more)
    assert done.code == 0, done.err
    return {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}


def test_every_event_gets_a_schema_and_the_document_its_channels(schemas: Run, tmp_path: Path) -> None:
    found = exported(schemas, tmp_path, FENCEPOST_DESTINATIONS=destinations())

    snapshots = {f"{name}.json" for name in ("invoice.paid.v1", "report.accepted.v1", "report.accepted.v2")}
    assert sorted(set(found) - snapshots) == [
        "asyncapi.json",
        "invoice.paid.v1.schema.json",
        "report.accepted.v1.schema.json",
        "report.accepted.v2.schema.json",
    ]
    assert schemas("check", "events", "--snapshots", "out").code == 0, "both may live in one folder"
    assert found["report.accepted.v1.schema.json"]["required"] == ["submission_id"]
    document = found["asyncapi.json"]
    assert "hunter2" not in json.dumps(document)
    assert (document["asyncapi"], document["info"]) == ("3.0.0", {"title": "Reports", "version": "1.2.3"})
    channels = {
        name: (channel["address"], sorted(channel["messages"])) for name, channel in document["channels"].items()
    }
    assert channels == {
        "reports.reports": ("reports", ["report.accepted.v1", "report.accepted.v2"]),
        "all.money.paid": ("paid", ["invoice.paid.v1"]),
        "all.rest": ("{type}", ["report.accepted.v1", "report.accepted.v2"]),
    }
    assert document["channels"]["all.rest"]["parameters"]["type"]["enum"] == ["report.accepted"]
    for reference in references(document):
        assert resolved(document, reference) is not None


def test_without_routes_there_are_messages_and_no_channels(schemas: Run, tmp_path: Path) -> None:
    document = exported(schemas, tmp_path)["asyncapi.json"]

    assert document["channels"] == {}
    assert sorted(document["components"]["messages"]) == [
        "invoice.paid.v1",
        "report.accepted.v1",
        "report.accepted.v2",
    ]


def references(value: object) -> list[str]:
    """Every reference in a document."""
    found: list[str] = []
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(cast(list[object], item))
        elif isinstance(item, dict):
            members = cast(dict[str, object], item)
            pending.extend(members.values())
            if isinstance(reference := members.get("$ref"), str):
                found.append(reference)
    return found


def resolved(document: Any, reference: str) -> object:
    assert reference.startswith("#/")
    found = document
    for part in reference[2:].split("/"):
        found = found[part]
    return found
