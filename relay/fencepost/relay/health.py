"""`/livez`, `/readyz` and `/metrics` of a relay; the server itself is in `fencepost.schemas.health`."""

from __future__ import annotations

from collections.abc import Callable

from fencepost.relay.readiness import Watch
from fencepost.schemas.health import STALLED_SECONDS, Answer, answers

__all__ = ["answering"]


def answering(
    watch: Watch, metrics: Callable[[], tuple[str, bytes]] | None, *, stalled: float = STALLED_SECONDS
) -> Callable[[str], Answer | None]:
    """What the three paths say; `metrics` gives content type and text, None where the extra is not installed."""
    return answers(lambda: watch.moving(stalled), lambda: _readiness(watch), metrics)


def _readiness(watch: Watch) -> tuple[bool, dict[str, object]]:
    report = watch.report()
    return report.ready, report.document()
