"""Others can use what `fencepost schemas export` writes: it is valid by the official schemas, and payloads are valid by it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fencepost.operate import asyncapi
from fencepost.operate.settings import DestinationSettings
from fencepost.schemas.event import Event, Private
from fencepost.schemas.wire_schema import schema_of
from support import javascript


class Line(BaseModel):
    price: Decimal
    parts: list[Line] = []


class Billed(Event, type="interop.billed", version=1):
    """Money is wanted."""

    lines: list[Line]
    due: datetime
    pair: tuple[int, str] = (1, "a")
    note: Private[str | None] = None


class BilledTwo(Event, type="interop.billed", version=2):
    total: Decimal


DESTINATIONS = [
    {"name": "one", "kind": "kafka", "address": "k:9092", "routes": [{"match": "*", "to": "topic"}]},
    {"name": "two", "kind": "rabbitmq", "address": "amqp://r/", "routes": [{"match": "*", "to": "x"}], "declare": True},
    {
        "name": "three",
        "kind": "kafka",
        "address": "k:9092",
        "routes": [{"match": "interop.billed", "to": "topic"}],
        "mode": "structured",
    },
]


@pytest.mark.parametrize("routed", [True, False])
def test_the_document_is_valid_by_the_schema_of_asyncapi(packages: Path, routed: bool) -> None:
    destinations = [DestinationSettings.model_validate(each) for each in DESTINATIONS] if routed else []
    document: Any = asyncapi.document([Billed, BilledTwo], destinations, title="Bills", version="1.0.0")
    spoilt = {**document, "channels": {"a": {"address": 7}}}
    checks = [{"op": "validate", "format": "asyncapi", "document": each} for each in (document, spoilt)]

    good, bad = javascript.ask(packages, *checks)

    assert good == []
    assert bad != []


def test_a_payload_is_valid_by_its_exported_schema_and_another_is_not(packages: Path) -> None:
    line = Line(price=Decimal("1.50"), parts=[Line(price=Decimal(2))])
    made = Billed(tenant="t", operation="o", lines=[line], due=datetime(2026, 1, 1, tzinfo=UTC), note="private")
    good = json.loads(made.payload())
    others: list[dict[str, Any]] = [{**good, "lines": [{}]}, {**good, "due": 7}, {**good, "_private": {"note": 1}}, {}]
    values = [good, {**good, "later": True}, *others]
    checks = [{"op": "validate", "format": "schema", "document": schema_of(Billed), "value": value} for value in values]

    answers = javascript.ask(packages, *checks)

    assert answers[:2] == [[], []]
    assert all(answers[2:])
