"""Waits that are bounded: shares are taken when they are due, and a relay leaves whatever its database does."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.relay.loop import DestinationLoop
from fencepost.relay.sidecar import END_SECONDS, Relay
from fencepost.schemas.health import HealthAddress
from support.database import Database
from support.health import LOOPBACK, becomes, running
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.proxy import Proxy
from support.relays import (
    BRISK,
    accepted,
    destination,
    expire,
    loop,
    owner_of,
    registered,
    relaying,
)

HERE = HealthAddress(LOOPBACK, 0)
# It would look at nothing for minutes, but for what is due.
LAZY = replace(BRISK, poll_min=300.0, poll_max=300.0)


def test_slots_that_become_free_are_taken_when_the_lease_is_renewed_however_long_a_relay_may_rest(
    database18: Database,
) -> None:
    with relaying(database18, destination(MemoryBroker()), pace=LAZY) as rests:
        with relaying(database18, destination(MemoryBroker())) as made:
            wait_for(lambda: made.slots_held == rests.slots_held == 8, 30, "both to have their share")
        wait_for(lambda: rests.slots_held == 16, 30, "the other's share to be taken")


def test_a_single_run_that_was_suspended_past_its_time_looks_once_more_before_it_leaves(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, pace = MemoryBroker(), replace(BRISK, lease=2.0)
    settle = DestinationLoop._settle  # pyright: ignore[reportPrivateUsage]
    turns = list[bool]()

    def suspend(loop: DestinationLoop, conn: Connection[Any]) -> bool:
        turns.append(settle(loop, conn))
        if len(turns) == 5:
            time.sleep(pace.lease + pace.refresh + 0.2)
        return turns[-1]

    registered(database18)
    accepted(database18, "a")
    with database18.connect(autocommit=True) as conn:
        dead = owner_of(database18, seconds=60)
        dead.refresh(conn)
        monkeypatch.setattr(DestinationLoop, "_settle", suspend)
        run = threading.Thread(target=loop(database18, destination(broker), pace=pace).run, kwargs={"once": True})
        run.start()
        wait_for(lambda: len(turns) == 5, 30, "looks at slots that are still the other's")
        expire(conn, dead)
        run.join(60)
    assert broker.operations() == ["a"]


def test_a_relay_with_a_doorbell_and_a_witness_leaves_a_silent_database_within_a_common_deadline(
    database18: Database,
) -> None:
    pace = replace(BRISK, answer=60.0, recycle=0.05)
    with Proxy(int(str(conninfo_to_dict(database18.dsn)["port"]))) as proxy:
        dsn = make_conninfo(database18.dsn, port=proxy.port)
        to = [destination(MemoryBroker())]
        made = Relay(dsn, to, state=database18.state, pace=pace, health=HERE, look=0.1, doorbell=True)
        with running(made):
            becomes(made, "ready")
            proxy.blackhole()
            began = time.monotonic()
        took = time.monotonic() - began
    # The watch of health has two seconds of its own, and the machine may be behind.
    assert took < pace.drain + pace.confirm + END_SECONDS + 2 + 2 + 5
