"""Log lines for machines or for people, without anything that a driver, a server or a client library may have quoted.

An exception of ours is told with its message; of any other only the class and the place. PostgreSQL's details and
contexts may hold values of rows, and clients like to repeat addresses with passwords.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import StrEnum
from pathlib import PurePath
from types import TracebackType

from fencepost.schemas.errors import FencepostError

__all__ = ["LogFormat", "Plain", "configure"]

# Extras that may be told: names and ids. Everything else that a caller attaches to a record stays out.
TOLD = ("destination", "tenant", "operation", "event_id", "slot", "job", "class", "attempt", "effect")
# Their messages are told as written in their source, without the arguments.
CLIENTS = ("aio_pika", "aiormq", "asyncio", "confluent_kafka", "httpcore", "httpx", "pamqp", "psycopg", "yarl")


class LogFormat(StrEnum):
    """One JSON object a line, or text."""

    JSON = "json"
    TEXT = "text"


def configure(chosen: LogFormat | None, *, verbose: bool) -> None:
    """Logging of this process to standard error; JSON unless a person is looking there."""
    wanted = chosen or (LogFormat.TEXT if sys.stderr.isatty() else LogFormat.JSON)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Plain(wanted))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("fencepost").setLevel(logging.DEBUG if verbose else logging.INFO)
    # The clients' own lines are about their connections; their silence is told by us, with the address.
    logging.getLogger("fencepost.relay.kafka.client").setLevel(logging.INFO if verbose else logging.CRITICAL)


class Plain(logging.Formatter):
    """Formats a record as one line: time, level, logger, message, ids, and of an error its class and place."""

    def __init__(self, how: LogFormat) -> None:
        super().__init__()
        self._how = how

    def format(self, record: logging.LogRecord) -> str:
        """One line, always."""
        fields = _fields(record)
        if self._how is LogFormat.JSON:
            return json.dumps(fields, ensure_ascii=False)
        head = f"{fields.pop('time')} {fields.pop('level')} {fields.pop('logger')}: {fields.pop('message')}"
        return head + "".join(f" {name}={value}" for name, value in fields.items() if name not in ("destination",))


def _fields(record: logging.LogRecord) -> dict[str, str]:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields = {
        "time": f"{seconds}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": " ".join(_message(record).split()),
    }
    for name in TOLD:
        value = record.__dict__.get(name)
        if value is not None:
            fields[name] = str(value)
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        fields["error"] = f"{type(error).__module__}.{type(error).__qualname__}"
        if isinstance(error, FencepostError):
            fields["detail"] = " ".join(str(error).split())
        fields["at"] = _place(record.exc_info[2])
    return fields


def _message(record: logging.LogRecord) -> str:
    if record.name.partition(".")[0] in CLIENTS:
        return str(record.msg) if record.args else f"(a line of {record.name} that may quote values)"
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - a wrong format must not take the line away
        return str(record.msg)


def _place(trace: TracebackType | None) -> str:
    """File and line of the innermost frame."""
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
