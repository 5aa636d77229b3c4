"""A database with a domain table, shared by a module and emptied for every test: clones are the dearest part."""

from collections.abc import Iterator

import pytest

from support.database import Database, Databases

TABLES = """
CREATE TABLE done (tenant text, operation text, document text, n int GENERATED ALWAYS AS IDENTITY);
"""
EMPTY = """
DELETE FROM done; DELETE FROM fencepost.reservation; DELETE FROM fencepost.unreserved_delivery;
DELETE FROM fencepost.dead_letter; DELETE FROM fencepost.job;
DELETE FROM fencepost.consumer_forever; DELETE FROM fencepost.consumer; DELETE FROM fencepost.consumer_topic;
DELETE FROM fencepost.duty; DELETE FROM fencepost.consumer_position;
"""


@pytest.fixture(scope="module")
def domain_of_module(databases: Databases) -> Iterator[Database]:
    made = databases.migrated()
    with made.connect() as conn:
        conn.execute(TABLES)
    yield made
    databases.drop(made)


@pytest.fixture
def domain(domain_of_module: Database) -> Database:
    """A database whose table `done` has no unique key, so that a second handling shows; on each PostgreSQL."""
    with domain_of_module.connect() as conn:
        conn.execute(EMPTY)
    return domain_of_module


@pytest.fixture(scope="module")
def domain18_of_module(databases18: Databases) -> Iterator[Database]:
    made = databases18.migrated()
    with made.connect() as conn:
        conn.execute(TABLES)
    yield made
    databases18.drop(made)


@pytest.fixture
def domain18(domain18_of_module: Database) -> Database:
    """As `domain`, on the newest PostgreSQL only, for tests whose cost lies in the broker."""
    with domain18_of_module.connect() as conn:
        conn.execute(EMPTY)
    return domain18_of_module
