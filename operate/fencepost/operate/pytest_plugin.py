"""Fixtures for applications that use fencepost; pytest loads them by itself, and nothing happens until one is used.

    fencepost_database   a migrated, armed database for this test alone, on your own PostgreSQL
    fencepost_broker     a broker in memory on that database
    fencepost_domain     override it in conftest.py: makes your own tables, once for the whole session

The server is told by ``--fencepost-postgres``, by FENCEPOST_TEST_DATABASE, or by ``fencepost_postgres`` in pytest's
settings, in this order: a connection string whose user may create databases. Databases get random names and are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # Imported when a fixture is used: a session that uses none pays for none.
    from fencepost.operate.testing.broker import MemoryBroker
    from fencepost.operate.testing.databases import Database, Databases, Domain

OPTION = "--fencepost-postgres"
INI = "fencepost_postgres"
VARIABLE = "FENCEPOST_TEST_DATABASE"
INSECURE = "FENCEPOST_INSECURE_DB"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Says where the server is."""
    group = parser.getgroup("fencepost")
    group.addoption(OPTION, default=None, metavar="DSN", help="PostgreSQL server for fencepost_database")
    parser.addini(INI, "PostgreSQL server for fencepost_database, a connection string", default="")


@pytest.fixture(scope="session")
def fencepost_domain() -> Domain | None:
    """Override it in conftest.py and return a function of a connection string that makes your own tables there.

    It runs once, for the template from which the database of each test is cloned, and must close its connections.
    """
    return None


@pytest.fixture(scope="session")
def fencepost_databases(
    pytestconfig: pytest.Config, fencepost_domain: Domain | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Databases]:
    """Makes databases on your server, for tests that need several; all that it made is dropped at the end."""
    from fencepost.operate.testing.databases import Databases
    from fencepost.schemas.errors import FencepostError

    try:
        server = _server(pytestconfig)
    except FencepostError as error:
        refused = _bare(error)
    else:
        made = Databases(server, tmp_path_factory.mktemp("fencepost"), fencepost_domain)
        yield made
        made.close()
        return
    raise refused from None


@pytest.fixture
def fencepost_database(fencepost_databases: Databases) -> Iterator[Database]:
    """A migrated and armed database of this test alone, with your own tables; raises Unreachable or ConfigError."""
    from fencepost.schemas.errors import FencepostError

    try:
        made = fencepost_databases.migrated()
    except FencepostError as error:
        refused = _bare(error)
    else:
        yield made
        fencepost_databases.drop(made)
        return
    raise refused from None


@pytest.fixture
def fencepost_broker(fencepost_database: Database) -> MemoryBroker:
    """A broker in memory on `fencepost_database`, its messages encoded as for Kafka."""
    from fencepost.operate.testing.broker import MemoryBroker

    return MemoryBroker(fencepost_database)


def _bare(error: Exception) -> Exception:
    """Without its frames: they have the connection string among their arguments, and pytest would show it."""
    return error.with_traceback(None)


def _server(config: pytest.Config) -> str:
    from fencepost.schemas.connect import checked_address
    from fencepost.schemas.errors import ConfigError

    found = str(config.getoption(OPTION) or os.environ.get(VARIABLE) or config.getini(INI))
    if not found:
        raise ConfigError(
            "no PostgreSQL server is named for fencepost_database",
            field=INI,
            hint=f"set {VARIABLE}, {OPTION}, or {INI} in pytest's settings; its user needs CREATEDB",
        )
    return checked_address(found, insecure=os.environ.get(INSECURE, "").lower() in ("1", "true", "yes", "on"))
