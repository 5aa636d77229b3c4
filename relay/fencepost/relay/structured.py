"""What an outbox row becomes in structured mode: one JSON document, the same for every copy of the event."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Literal, cast
from uuid import UUID

from fencepost.relay.publisher import OutboxRow
from fencepost.schemas import json_format
from fencepost.schemas.digest import Digest
from fencepost.schemas.envelope import Envelope

Mode = Literal["binary", "structured"]
"""How a destination gets its events: attributes in headers and the payload as it is, or everything in one document."""


def document(row: OutboxRow, source: str) -> bytes:
    """The document of a row of this source; FencepostError, ValueError or TypeError when the row can never become one."""
    return json_format.encode(
        Envelope(
            id=UUID(str(row.event_id)),
            source=source,
            type=row.type,
            version=row.version,
            tenant=row.tenant,
            operation=row.operation,
            ordering_key=row.ordering_key,
            epoch=row.epoch,
            digest=Digest.parse_raw(row.digest),
            sequence=row.seq,
            time=datetime.fromisoformat(row.recorded_at),
            payload=row.payload,
            attributes=cast(dict[str, str], json.loads(row.attributes)) if row.attributes else {},
            reference=row.reference,
        )
    )
