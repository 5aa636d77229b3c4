"""What a connection sent to its server, as libpq saw it: statements and round trips, whoever sent them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from psycopg import AsyncConnection, Connection

__all__ = ["Sent", "listening"]

_SENT = re.compile(r'\tF\t\d+\t(\w+)(?:\t "(.*?)"(?: "(.*?)")?)?[ \n]', re.DOTALL)


@dataclass(slots=True)
class Sent:
    """``statements``: the text of each, or the name under which it was prepared; without BEGIN and COMMIT."""

    statements: list[str] = field(default_factory=list[str])
    round_trips: int = 0


@contextmanager
def listening(conn: Connection[Any] | AsyncConnection[Any]) -> Generator[Sent]:
    """What is sent in the block, known at its end."""
    sent = Sent()
    with tempfile.TemporaryFile() as file:
        conn.pgconn.trace(file.fileno())
        try:
            yield sent
        finally:
            conn.pgconn.untrace()
        file.seek(0)
        unnamed = bound = ""
        for kind, first, second in _SENT.findall(file.read().decode(errors="replace")):
            sent.round_trips += kind in ("Query", "Sync")
            if kind == "Parse" and not first:
                unnamed = second
            elif kind == "Bind":
                bound = second or unnamed
            elif (text := {"Query": first, "Execute": bound}.get(kind, "BEGIN")) not in ("BEGIN", "COMMIT"):
                sent.statements.append(text)
