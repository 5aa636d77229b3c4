"""A short form of the soak: kills, stops and redeliveries, and each operation is applied exactly once."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.soak_consumer import soak

from support.database import Databases
from support.services import Kafka, Rabbit, unique

EVENTS = 1000


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
def test_each_operation_is_applied_exactly_once_under_kills_and_redeliveries(
    databases18: Databases, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    broker: Kafka | Rabbit = request.getfixturevalue("kafka" if kind == "kafka" else "rabbitmq")
    address = broker.bootstrap if isinstance(broker, Kafka) else broker.url
    database = databases18.migrated()
    try:
        found = soak(
            kind, database, address, count=EVENTS, seed=7, seconds=150, folder=tmp_path / unique("soak"), pause=1.5
        )
    finally:
        databases18.drop(database)
    assert (found.applied, found.operations, found.reservations) == (EVENTS, EVENTS, EVENTS)
    assert found.dead_letters == 0
    assert found.kills + found.stops + found.joins > 0, "nothing was done to the consumers"
