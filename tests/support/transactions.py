"""Engines, sessions and a Django connection of one test's database, ended with the test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import django.db
import sqlalchemy
from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from support.database import Database

ALIAS = "fencepost_test"


class Base(DeclarativeBase):
    """The tables of the tests' own models."""


class Thing(Base):
    """A domain row; names are unique, so that a second one is refused at the flush."""

    __tablename__ = "thing"
    name: Mapped[str] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(default="")


def url(dsn: str, driver: str = "psycopg") -> sqlalchemy.URL:
    """The address as SQLAlchemy wants it."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    host, port = parts.pop("host"), parts.pop("port", None)
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=parts.pop("user", None),
        password=parts.pop("password", None),
        database=parts.pop("dbname"),
        query={"host": host, **({"port": port} if port else {}), **parts},
    )


def things(database: Database) -> None:
    """Makes the domain table."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE thing (name text PRIMARY KEY, note text NOT NULL DEFAULT '')")


@contextmanager
def engine(dsn: str, **options: Any) -> Generator[sqlalchemy.Engine]:
    """An engine without prepared statements, so that a pooler may stand in between."""
    made = sqlalchemy.create_engine(url(dsn), connect_args={"prepare_threshold": None}, **options)
    try:
        yield made
    finally:
        made.dispose()


@asynccontextmanager
async def async_engine(dsn: str, **options: Any) -> AsyncGenerator[AsyncEngine]:
    """As `engine`, for asyncio."""
    made = create_async_engine(url(dsn), connect_args={"prepare_threshold": None}, **options)
    try:
        yield made
    finally:
        await made.dispose()


@contextmanager
def django_connection(dsn: str) -> Generator[BaseDatabaseWrapper]:
    """Django's own connection to this database, under an alias of the tests."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    database: dict[str, Any] = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": parts.pop("host"),
        "PORT": parts.pop("port", ""),
        "NAME": parts.pop("dbname"),
        "USER": parts.pop("user", ""),
        "PASSWORD": parts.pop("password", ""),
        "OPTIONS": parts,
    }
    if not settings.configured:
        settings.configure(DATABASES={"default": database}, USE_TZ=True)
        django.setup()
    handler = django.db.connections
    handler.settings[ALIAS] = handler.configure_settings({"default": {}, ALIAS: database})[ALIAS]
    made = handler[ALIAS]
    try:
        yield made
    finally:
        made.close()
        del handler[ALIAS]
