"""The application's own tables, as its conftest.py makes them."""

from collections.abc import Callable

import psycopg
import pytest

from support.kit.app import SCHEMA


@pytest.fixture(scope="session")
def fencepost_domain() -> Callable[[str], None]:
    """Runs once, for the template."""

    def make(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute(SCHEMA)

    return make
