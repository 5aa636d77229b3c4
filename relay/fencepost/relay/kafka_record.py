"""What an outbox row becomes in Kafka: a key, headers and the unchanged payload (or its document), or why it never can."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from fencepost.relay.publisher import UNKNOWN_VERSION, Answer, OutboxRow, Outcome, ParkReason
from fencepost.relay.structured import Mode, document
from fencepost.schemas.digest import TAG
from fencepost.schemas.envelope import CONTENT_TYPE
from fencepost.schemas.errors import FencepostError
from fencepost.schemas.kafka_binding import STRUCTURED_HEADERS, encoder
from fencepost.schemas.kafka_binding import key as kafka_key

RECORD_OVERHEAD = 128
HEADER_OVERHEAD = 10
KEY_AND_HEADERS_BYTES = 65_536
"""More than key and headers of any event take: 4 KiB of our own, 16 attributes of 2 KiB, and their overhead."""

Headers = list[tuple[str, str | bytes | None]]
Record = tuple[bytes, Headers, bytes]
"""Key, headers and value."""


class Records:
    """Makes records of one source in one mode; equal rows give equal bytes."""

    def __init__(self, source: str, mode: Mode = "binary") -> None:
        self._source = source
        self._structured = mode == "structured"
        self._encode = encoder(source)

    def of(self, row: OutboxRow) -> Record | Outcome:
        """The record, or the refusal of a row that can never become a record."""
        (
            _,
            seq,
            event_id,
            tenant,
            operation,
            type_,
            version,
            epoch,
            ordering_key,
            digest,
            time,
            content_type,
            extra,
            payload,
            ref,
        ) = row
        if digest[:1] != TAG or content_type != CONTENT_TYPE:
            return UNKNOWN_VERSION
        try:
            if not payload:
                raise ValueError("an empty payload would be a tombstone")
            if self._structured:
                return (
                    kafka_key(tenant, ordering_key),
                    cast(Headers, list(STRUCTURED_HEADERS)),
                    document(row, self._source),
                )
            attributes = cast(dict[str, str], json.loads(extra)) if extra else None
            headers = self._encode(
                event_id, type_, version, tenant, operation, ordering_key, epoch, digest, seq, time, attributes, ref
            )
            return kafka_key(tenant, ordering_key), cast(Headers, headers), payload
        except (FencepostError, ValueError, TypeError, AttributeError) as error:
            return Outcome(Answer.REFUSED, ParkReason.UNDECODABLE, type(error).__name__)


def excess(record: Record, limit: int | None) -> str:
    """By how much the record, uncompressed and alone in its batch, may be beyond the limit; empty when it fits."""
    if limit is None or len(record[2]) + KEY_AND_HEADERS_BYTES <= limit:
        return ""
    size = _size(*record)
    return f"{size} bytes, the topic takes {limit}" if size > limit else ""


def _size(key: bytes, headers: Sequence[tuple[str, str | bytes | None]], value: bytes) -> int:
    return (
        len(key)
        + len(value)
        + RECORD_OVERHEAD
        + sum(len(name) + len(content or b"") + HEADER_OVERHEAD for name, content in headers)
    )
