"""The sidecar under a login that may publish and nothing else: it publishes, and leaves other duties to others (G14)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.relay.sidecar import Relay
from fencepost.schemas import grants, migrate
from fencepost.schemas.health import HealthAddress
from fencepost.schemas.witness import FileWitness
from support.database import Database
from support.health import LOOPBACK, running
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import BRISK, accepted, arrived, destination

INSTALL = "sidecar"


@pytest.fixture
def separate(empty_database: Database) -> Iterator[Database]:
    """A database with a role for each kind of work."""
    migrate.apply(empty_database.dsn, state=empty_database.state, single_role=False, install=INSTALL)
    yield empty_database
    roles = [sql.Identifier(grants.role(INSTALL, name)) for name in ("owner", *grants.ROLES)]
    with empty_database.connect(autocommit=True) as conn:
        conn.execute("DROP SCHEMA fencepost CASCADE")
        for role in roles:
            conn.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(role))
            conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
        for role in roles:
            conn.execute(sql.SQL("DROP ROLE {}").format(role))


def as_role(database: Database, name: str) -> str:
    """A connection string under which only this role's rights count."""
    return make_conninfo(database.dsn, options=f"-c role={grants.role(INSTALL, name)}")


def test_a_login_with_the_relay_role_alone_publishes_and_says_that_it_keeps_no_witness(
    separate: Database, caplog: pytest.LogCaptureFixture
) -> None:
    accepted(separate, "a")
    control = MemoryBroker()
    Relay(separate.dsn, [destination(control)], state=separate.state, pace=BRISK).run_once()
    assert control.operations() == ["a"]
    before = FileWitness(separate.state).read().head

    broker, state = MemoryBroker(), separate.state
    accepted(separate, "b")
    Relay(as_role(separate, "relay"), [destination(broker)], state=state, pace=BRISK).run_once()
    assert broker.operations() == ["b"]
    with caplog.at_level("INFO", "fencepost.relay"):
        health = HealthAddress(LOOPBACK, 0)
        with running(Relay(as_role(separate, "relay"), [destination(broker)], state=state, pace=BRISK, health=health)):
            accepted(separate, "c")
            assert arrived(broker.operations, 2) == ["b", "c"]
            wait_for(lambda: "role armer" in caplog.text, 10, "the relay to say so")
    assert FileWitness(state).read().head == before


def test_a_sidecar_without_a_state_folder_needs_no_witness(separate: Database, tmp_path: Path) -> None:
    accepted(separate, "a")
    broker = MemoryBroker()
    Relay(as_role(separate, "relay"), [destination(broker)], state=tmp_path / "none", pace=BRISK).run_once()
    assert broker.operations() == ["a"]
    assert not (tmp_path / "none").exists()
