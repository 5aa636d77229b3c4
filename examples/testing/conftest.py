"""The application's own tables, made once; the database of each test is a copy."""

from collections.abc import Callable

import psycopg
import pytest

from .app import SCHEMA


@pytest.fixture(scope="session")
def fencepost_domain() -> Callable[[str], None]:
    """Makes them where it is told to, and leaves no connection open."""

    def make(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute(SCHEMA)

    return make
