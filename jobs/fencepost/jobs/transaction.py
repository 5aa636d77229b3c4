"""The connection that a publication callback gets: it can write, but not end or leave the fenced transaction.

A guard against mistakes, not against malice: authority is checked by PostgreSQL at commit whatever the client does.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

from psycopg import Connection, Cursor
from psycopg.abc import Params, Query
from psycopg.rows import RowFactory
from psycopg.sql import Composable

from fencepost.schemas.connect import Punctual
from fencepost.schemas.errors import WrongTransaction

__all__ = ["FencedTransaction"]

_TEXT = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|(\$[A-Za-z_]*\$).*?\1|--[^\n]*|/\*.*?\*/""",
    re.DOTALL,
)
_FORBIDDEN = re.compile(
    r"(?:^|;)\s*(commit|rollback|abort|end|begin|start\s+transaction|prepare\s+transaction"
    r"|(?:re)?set\s+(?:(?:session|local)\s+)?(?:role|session\s+authorization)"
    r"|set\s+constraints|discard)\b",
    re.IGNORECASE,
)


class FencedCursor(Cursor[Any]):
    """A cursor whose statements can neither end the transaction nor change who it acts as."""

    def execute(
        self, query: Any, params: Params | None = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Self:
        _inspect(query, self._conn)
        return super().execute(query, params, prepare=prepare, binary=binary)

    def executemany(self, query: Query, params_seq: Iterable[Params], *, returning: bool = False) -> None:
        _inspect(query, self._conn)
        super().executemany(query, params_seq, returning=returning)

    def stream(
        self, query: Query, params: Params | None = None, *, binary: bool | None = None, size: int = 1
    ) -> Iterator[Any]:
        _inspect(query, self._conn)
        return super().stream(query, params, binary=binary, size=size)


class FencedTransaction(Punctual[Any]):
    """Writes inside the fenced transaction; commit, rollback, close, autocommit and SET ROLE raise WrongTransaction.

    A psycopg Connection for everything else: `enqueue` and `submit` take it, `transaction()` makes a savepoint, and a
    savepoint made here can be rolled back to. Usable until the callback returns.
    """

    @classmethod
    @contextmanager
    def over(cls, conn: Connection[Any], *, answer_within: float | None = None) -> Generator[FencedTransaction]:
        """Lends the connection's transaction for the length of the block; the connection itself must be left alone."""
        lent = cls(conn.pgconn, conn.row_factory)
        lent.answer_within = answer_within
        lent.prepare_threshold = None
        lent._adapters = conn.adapters
        lent.cursor_factory = FencedCursor
        try:
            yield lent
        finally:
            lent._closed = True

    def __del__(self, *_: Any) -> None:
        """Nothing to close: the connection was only lent."""

    def __exit__(self, *_: object) -> None:
        """Leaves a `with` block without ending the transaction."""

    @property
    def closed(self) -> bool:
        return self._closed or super().closed

    def cursor(
        self, name: str = "", *, binary: bool = False, row_factory: RowFactory[Any] | None = None, **kw: Any
    ) -> Any:
        """A cursor; server-side ones are refused, because their text would not be looked at."""
        if name or kw:
            _refuse("server_cursor", "read with an ordinary cursor")
        return super().cursor(binary=binary, row_factory=row_factory or self.row_factory)

    def commit(self) -> NoReturn:
        _refuse("commit", "return from the callback: the fence is checked and committed after it")

    def rollback(self) -> NoReturn:
        _refuse("rollback", "raise an exception: nothing is published then")

    def close(self) -> NoReturn:
        _refuse("close", "return from the callback")

    def set_autocommit(self, value: bool) -> NoReturn:
        _refuse("autocommit", "the fenced transaction is one transaction")

    def set_isolation_level(self, value: Any) -> NoReturn:
        _refuse("isolation", "the fenced transaction has begun")

    def pipeline(self) -> NoReturn:
        _refuse("pipeline", "results would come after the check")

    def tpc_begin(self, xid: Any) -> NoReturn:
        _refuse("tpc", "the fenced transaction cannot be prepared")


def _inspect(query: Query, conn: Connection[Any]) -> None:
    if conn.closed:
        _refuse("callback", "the transaction is over: use it only inside the callback")
    text = query.as_string(None) if isinstance(query, Composable) else query
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not isinstance(text, str):
        _refuse("query", "pass text or psycopg.sql objects")
    found = _FORBIDDEN.search(_TEXT.sub(" ", text).strip())
    if found is not None:
        _refuse(" ".join(found.group(1).lower().split()), "return from the callback to publish, raise to give up")


def _refuse(what: str, hint: str) -> NoReturn:
    raise WrongTransaction(f"{what} is refused inside a fenced transaction", field=what, hint=hint)
