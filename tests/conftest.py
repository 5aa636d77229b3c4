"""Fixtures for real services and for databases of single tests. A missing service skips loudly, and fails in CI."""

from collections.abc import Iterator

import pytest

from stack.obtain import Obtained
from stack.postgres import MAJORS, PostgresServer
from support.database import Database, Databases
from support.services import Kafka, Pooler, Rabbit, Services, missing, summary

SERVICES = pytest.StashKey[Services]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SERVICES] = Services()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[SERVICES].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in summary(config.stash[SERVICES]):
        loud = not line.startswith("services:")
        terminalreporter.write_line(line, red=loud, green=not loud, bold=loud)


@pytest.fixture(scope="session")
def services(pytestconfig: pytest.Config) -> Services:
    """Every service, started when first asked for: for tests that need a choice of their own."""
    return pytestconfig.stash[SERVICES]


@pytest.fixture(scope="session", params=MAJORS, ids=[f"pg{major}" for major in MAJORS])
def pg_major(request: pytest.FixtureRequest) -> str:
    """Each supported PostgreSQL in turn."""
    major: str = request.param
    return major


@pytest.fixture(scope="session")
def pg(services: Services, pg_major: str) -> Obtained[PostgresServer]:
    """Each supported PostgreSQL in turn, newest first: the test runs once per version."""
    return services.postgres(pg_major)


@pytest.fixture(scope="session")
def pg18(services: Services) -> Obtained[PostgresServer]:
    """The newest supported PostgreSQL only, for tests whose cost lies in the broker."""
    return services.postgres(MAJORS[0])


@pytest.fixture(scope="session")
def databases(pg: Obtained[PostgresServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Makes databases on `pg`, for tests that need several."""
    made = Databases(pg.address, tmp_path_factory.mktemp("witness"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def databases18(pg18: Obtained[PostgresServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Makes databases on `pg18`."""
    made = Databases(pg18.address, tmp_path_factory.mktemp("witness18"))
    yield made
    made.close()


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    """A migrated and armed database of this test, on each supported PostgreSQL."""
    made = databases.migrated()
    yield made
    databases.drop(made)


@pytest.fixture
def database18(databases18: Databases) -> Iterator[Database]:
    """A migrated and armed database of this test, on the newest supported PostgreSQL only."""
    made = databases18.migrated()
    yield made
    databases18.drop(made)


@pytest.fixture
def empty_database(databases: Databases) -> Iterator[Database]:
    """A database without our schema, on each supported PostgreSQL."""
    made = databases.empty()
    yield made
    databases.drop(made)


@pytest.fixture(scope="session")
def pgbouncer(services: Services, pg_major: str) -> Pooler:
    """A transaction-mode pooler in front of `pg`; `pgbouncer.dsn(database.dsn)` is the way through it."""
    return services.pgbouncer(pg_major)


@pytest.fixture(scope="session")
def pgbouncer18(services: Services) -> Pooler:
    """A transaction-mode pooler in front of `pg18`."""
    return services.pgbouncer(MAJORS[0])


@pytest.fixture(scope="session")
def rabbitmq(services: Services) -> Rabbit:
    """RabbitMQ, shared by the session; `rabbitmq.name()` gives queue names of your own."""
    return services.rabbitmq()


@pytest.fixture(scope="session")
def kafka(services: Services) -> Kafka:
    """Kafka, shared by the session: real where it can be had, else the stand-in (never in CI)."""
    return services.kafka()


@pytest.fixture(scope="session")
def real_kafka(kafka: Kafka) -> Kafka:
    """Kafka that keeps what it acknowledges; skips (in CI: fails) where only the stand-in is there."""
    if not kafka.real:
        missing("only the mock cluster is here, and this test needs a real Kafka")
    return kafka
