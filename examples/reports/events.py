"""The facts of this workflow. Content and digest; the document itself stays in the domain's tables."""

from __future__ import annotations

from fencepost.schemas.event import Event


class ReportAccepted(Event, type="report.accepted", version=1):
    """A document was submitted and will be reported on."""

    submission_id: str
    package: str
    kind: str
    sha256: str


class ReportPublished(Event, type="report.published", version=1):
    """The report on a submission was published, with the provider's receipt for its summary."""

    submission_id: str
    receipt: str
