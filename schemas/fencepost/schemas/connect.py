"""Connections as every part of fencepost needs them: with deadlines, without prepared statements, errors without secrets."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict

from fencepost.schemas.errors import ConfigError, Unreachable

CONNECT_TIMEOUT_SECONDS = 5
LOOPBACK = {"", "localhost", "127.0.0.1", "::1"}

_OPTIONS: dict[str, Any] = {
    # A pooler in transaction mode gives every transaction another session.
    "prepare_threshold": None,
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "application_name": "fencepost",
    # A peer that is gone is noticed; our own deadlines cover a peer that is silent.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def address(dsn: str) -> str:
    """Host, port and database of a connection string, never a user or a password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "an unreadable connection string"
    return f"postgresql://{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def is_loopback(dsn: str) -> bool:
    """True when every host of the connection string is this machine."""
    host = str(conninfo_to_dict(dsn).get("host") or "")
    return all(h in LOOPBACK or h.startswith("/") for h in host.split(","))


def _kwargs(dsn: str) -> dict[str, Any]:
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigError(
            "the connection string cannot be read", field="database", hint="example: postgresql://user@host:5432/name"
        ) from None
    return {k: v for k, v in _OPTIONS.items() if k not in given}


def connect(dsn: str, *, autocommit: bool = False) -> Connection[tuple[Any, ...]]:
    """A connection, or `Unreachable` with the address (no password) within `connect_timeout` seconds (default 5)."""
    try:
        return Connection.connect(dsn, autocommit=autocommit, **_kwargs(dsn))
    except psycopg.OperationalError as error:
        raise _unreachable(dsn, error) from None


async def connect_async(dsn: str, *, autocommit: bool = False) -> AsyncConnection[tuple[Any, ...]]:
    """As `connect`, for asyncio."""
    try:
        return await AsyncConnection.connect(dsn, autocommit=autocommit, **_kwargs(dsn))
    except psycopg.OperationalError as error:
        raise _unreachable(dsn, error) from None


def _unreachable(dsn: str, error: psycopg.OperationalError) -> Unreachable:
    reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return Unreachable(
        f"PostgreSQL did not answer: {reason[0].strip()}",
        address=address(dsn),
        field="database",
        hint="check that the server runs and that the address is right",
    )
