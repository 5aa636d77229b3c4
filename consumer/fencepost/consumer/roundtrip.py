"""One round trip: what begins the transaction and the reservation, below psycopg's cursors.

A handler's own statement should be all that a message costs besides BEGIN and COMMIT. The first times, and wherever the
connection prepares nothing (``prepare_threshold=None``, as behind some poolers), it is one query of words; after as many
times as psycopg would take, a prepared statement in a pipeline, which the server does not read and plan anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Connection
from psycopg.abc import PQGen
from psycopg.errors import DuplicatePreparedStatement, FeatureNotSupported, InvalidSqlStatementName, error_from_result
from psycopg.generators import execute
from psycopg.pq import Escaping, ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from fencepost.consumer.outcomes import Reservation, Reserved

__all__ = ["ALONE", "ARGUMENTS", "Unprepared", "reserving"]

# Nothing is recorded: what would have to be kept was not given, for hardly any delivery needs it.
ALONE = "alone"

# Content goes as parameters, where it is needed; here are names only.
RESERVE: LiteralString = """
SELECT fencepost.reserve(
    %(tenant)s, %(consumer)s, %(operation)s, %(type)s, %(version)s, %(event_id)s, %(source)s, %(epoch)s, %(binding)s,
    %(event_time)s, %(coordinates)s, NULL, NULL, %(wait_ms)s), pg_current_xact_id()"""
ARGUMENTS = (
    "tenant", "consumer", "operation", "type", "version", "event_id", "source", "epoch", "binding", "event_time",
    "coordinates", "wait_ms",
)  # fmt: skip
_STATEMENT = b"fencepost_reserve"
_PREPARED = (RESERVE % {name: f"${n}" for n, name in enumerate(ARGUMENTS, 1)}).encode()


class Unprepared(Exception):
    """The server has lost the prepared statement, or has another one: nothing was done, and this connection prepares no more."""


_NEVER = -1
_RESERVED = {str(each): each for each in Reserved}
_uses: WeakKeyDictionary[Connection[Any] | AsyncConnection[Any], int] = WeakKeyDictionary()


def reserving(
    conn: Connection[Any] | AsyncConnection[Any],
    opening: Sequence[bytes],
    arguments: Sequence[str],
    meanwhile: Callable[[], None],
) -> PQGen[Reservation | None]:
    """Reserves, after the statements of ``opening``; None for alone. For ``conn.wait``, under ``conn.lock``.

    ``arguments`` stand in the order of ARGUMENTS.
    ``meanwhile`` runs once all is sent; what it raises is raised when the answer was read.
    """
    pgconn = conn.pgconn
    named = pgconn.parameter_status(b"application_name")
    threshold, uses = conn.prepare_threshold, _uses.get(conn, 0)
    piped = threshold is not None and threshold <= uses
    if piped:
        yield from _send_piped(pgconn, opening, _encoded(conn, arguments), prepare=uses == threshold)
    else:
        pgconn.send_query(b"; ".join([*opening, _in_words(conn, arguments)]))
        pgconn.flush()
    failed: BaseException | None = None
    try:
        meanwhile()
    except BaseException as raised:  # noqa: BLE001  # again below: an answer is never left unread
        failed = raised
    answer = (yield from _fetch_piped(pgconn)) if piped else (yield from execute(pgconn))[-1]
    if uses != _NEVER and (not piped or uses == threshold):
        _uses[conn] = uses + 1
    if failed is not None:
        raise failed
    if answer.status != ExecStatus.TUPLES_OK:
        error = error_from_result(answer)
        if isinstance(error, (InvalidSqlStatementName, DuplicatePreparedStatement, FeatureNotSupported)):
            _uses[conn] = _NEVER
            raise Unprepared from error
        raise error
    outcome, arrivals, other_epoch = (answer.get_value(0, 0) or b"")[1:-1].decode().split(",")
    if outcome == ALONE:
        return None
    mark = pgconn.parameter_status(b"application_name")
    # A name that is the mark already, or is not reported, tells nothing.
    return Reservation(
        _RESERVED[outcome],
        int(arrivals),
        other_epoch == "t",
        (answer.get_value(0, 1) or b"").decode(),
        None if mark == named else mark,
    )


def _send_piped(pgconn: PGconn, opening: Sequence[bytes], values: list[bytes], *, prepare: bool) -> PQGen[None]:
    pgconn.enter_pipeline_mode()
    for statement in opening:
        pgconn.send_query_params(statement, None)
    if prepare:
        pgconn.send_prepare(_STATEMENT, _PREPARED)
    pgconn.send_query_prepared(_STATEMENT, values)
    pgconn.pipeline_sync()
    while pgconn.flush():
        if (yield Wait.RW) & Wait.R:
            pgconn.consume_input()


def _fetch_piped(pgconn: PGconn) -> PQGen[PGresult]:
    """The answer of the last statement, or of the first that was refused; the connection has left the pipeline again."""
    answer: PGresult | None = None
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:  # the end of one statement
            continue
        if result.status == ExecStatus.PIPELINE_SYNC:
            break
        if answer is None or answer.status not in (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED):
            answer = result
    pgconn.exit_pipeline_mode()
    assert answer is not None
    return answer


def _in_words(conn: Connection[Any] | AsyncConnection[Any], arguments: Sequence[str]) -> bytes:
    """The query with its arguments as literals."""
    plain = "".join(arguments)
    if plain.isascii() and "'" not in plain and "\\" not in plain:
        return (RESERVE % dict(zip(ARGUMENTS, (f"'{each}'" for each in arguments), strict=True))).encode()
    literal, encoding = Escaping(conn.pgconn).escape_literal, conn.info.encoding
    written = (bytes(literal(each.encode(encoding))).decode(encoding) for each in arguments)
    return (RESERVE % dict(zip(ARGUMENTS, written, strict=True))).encode(encoding)


def _encoded(conn: Connection[Any] | AsyncConnection[Any], arguments: Sequence[str]) -> list[bytes]:
    together = "\0".join(arguments)  # at once costs least, and none of them may hold that
    return together.encode("ascii" if together.isascii() else conn.info.encoding).split(b"\0")
