"""A complete envelope whose digest is right, for tests that change one thing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import UUID

from fencepost.schemas.content import binding
from fencepost.schemas.digest import digest
from fencepost.schemas.envelope import Envelope


def an_envelope(
    *,
    payload: bytes = b'{"a":1}',
    attributes: Mapping[str, str] | None = None,
    reference: str | None = None,
    tenant: str = "ténant",
    operation: str = "op-1",
    ordering_key: str = "report-7",
    sequence: int = 2**63 - 1,
    epoch: int = 2**53 + 1,
) -> Envelope:
    bound = binding(payload) if reference is None else reference
    return Envelope(
        id=UUID("018f2d6e-7b00-7000-8000-000000000001"),
        source="urn:fencepost:test",
        type="report.accepted",
        version=2,
        tenant=tenant,
        operation=operation,
        ordering_key=ordering_key,
        epoch=epoch,
        digest=digest(tenant, operation, "report.accepted", 2, epoch, bound),
        sequence=sequence,
        time=datetime(2024, 2, 29, 10, 0, 0, 5, tzinfo=UTC),
        payload=payload,
        attributes=dict(attributes or {}),
        reference=reference,
    )
