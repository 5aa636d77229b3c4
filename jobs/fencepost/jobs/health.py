"""`/livez`, `/readyz` and `/metrics` beside a worker; the server itself is in `fencepost.schemas.health`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from fencepost.jobs.standing import Standing
from fencepost.schemas.health import STALLED_SECONDS, HealthAddress, HealthServer, answers

__all__ = ["serving"]

log = logging.getLogger("fencepost.jobs.health")


@contextmanager
def serving(standing: Standing, address: HealthAddress, *, stalled: float = STALLED_SECONDS) -> Generator[HealthServer]:
    """Health is told while the block runs; it asks the database nothing. ConfigError when the address cannot be had.

    Alive: the worker's loop took a step within ``stalled`` seconds, whatever its handlers do. Ready: the database answers
    and is armed, the journal can be written, and the worker does not drain.
    """
    server = HealthServer(address, answers(lambda: standing.moving(stalled), standing.readiness, _metrics(standing)))
    server.start()
    log.info("health is served on port %d", server.port)
    try:
        yield server
    finally:
        server.stop()


def _metrics(standing: Standing) -> Callable[[], tuple[str, bytes]] | None:
    """None without the extra `metrics`."""
    try:
        from fencepost.jobs.metrics import exposition
    except ModuleNotFoundError:
        return None
    return exposition(standing)
