"""Fixtures for real services and for databases of single tests. A missing service skips loudly, and fails in CI."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Protocol

import pytest

from stack import obtain
from stack.obtain import Obtained
from stack.postgres import MAJORS, PostgresServer
from stack.s3 import S3Server
from support.database import Database, Databases
from support.services import Kafka, Pooler, Rabbit, Services, Used, missing, summary

SERVICES = pytest.StashKey[Services]()
USED = pytest.StashKey[list[Used]]()
OUTPUT = "fencepost_services"
WORKERS = 3


class Worker(Protocol):
    """What we know of a worker in its controller."""

    config: pytest.Config


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SERVICES] = Services()
    config.stash[USED] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes run tests with `-n auto`: each starts services of its own, on one set there is room for one.

    Invariant: tests of two workers never meet on one server. An open transaction of any of its databases holds up the
    relays of all the others, and a server's roles and activity belong to nobody.
    """
    return 0 if obtain.given() else WORKERS


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the services: after the fixtures that stand on them, and before a worker says that it is through."""
    used = session.config.stash[SERVICES].used()
    session.config.stash[USED].append(used)
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[OUTPUT] = used
    session.config.stash[SERVICES].close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Worker) -> None:
    """Takes over what a worker has used; one that died could not say it, and its death is an error anyway."""
    output: dict[str, Used] = getattr(node, "workeroutput", {})
    if OUTPUT in output:
        node.config.stash[USED].append(output[OUTPUT])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    used: list[Used] = config.stash[USED]
    for line in summary(used):
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
def databases_on(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Databases]]:
    """Makes databases on a PostgreSQL of this version: one template each, however often tests go from one to the other."""
    with ExitStack() as opened:

        @cache
        def on(major: str) -> Databases:
            made = Databases(services.postgres(major).address, tmp_path_factory.mktemp(f"witness{major}"))
            opened.callback(made.close)
            return made

        yield on


@pytest.fixture(scope="session")
def databases(databases_on: Callable[[str], Databases], pg_major: str) -> Databases:
    """Makes databases on `pg`, for tests that need several."""
    return databases_on(pg_major)


@pytest.fixture(scope="session")
def databases18(databases_on: Callable[[str], Databases]) -> Databases:
    """Makes databases on `pg18`."""
    return databases_on(MAJORS[0])


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
def s3(services: Services) -> Obtained[S3Server]:
    """A server of the S3 protocol, shared by the session; make a bucket of your own."""
    return services.s3()


@pytest.fixture(scope="session")
def real_kafka(kafka: Kafka) -> Kafka:
    """Kafka that keeps what it acknowledges; skips (in CI: fails) where only the stand-in is there."""
    if not kafka.real:
        missing("only the mock cluster is here, and this test needs a real Kafka")
    return kafka
