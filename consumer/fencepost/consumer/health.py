"""`/livez`, `/readyz` and `/metrics` beside a runner; the server itself is in `fencepost.schemas.health`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from fencepost.consumer.readiness import LOOK_SECONDS, Watch
from fencepost.consumer.standing import Standing
from fencepost.schemas.health import STALLED_SECONDS, HealthAddress, HealthServer, answers

__all__ = ["serving"]

log = logging.getLogger("fencepost.consumer.health")


@contextmanager
def serving(
    standing: Standing,
    dsn: str,
    address: HealthAddress,
    *,
    stalled: float = STALLED_SECONDS,
    look: float = LOOK_SECONDS,
) -> Generator[HealthServer]:
    """Health is told while the block runs, from before the first connection until after the last acknowledgement.

    ``standing`` is a runner's; ``dsn`` is looked at on a connection of its own, every ``look`` seconds. ConfigError when
    the address cannot be had.
    """
    watch = Watch(dsn, standing, look=look)
    server = HealthServer(address, answers(lambda: watch.moving(stalled), lambda: _readiness(watch), _metrics(watch)))
    server.start()
    log.info("health is served on port %d", server.port)
    watch.start()
    try:
        yield server
    finally:
        watch.stop()
        server.stop()


def _readiness(watch: Watch) -> tuple[bool, dict[str, object]]:
    report = watch.report()
    return report.ready, report.document()


def _metrics(watch: Watch) -> Callable[[], tuple[str, bytes]] | None:
    """None without the extra `metrics`."""
    try:
        from fencepost.consumer.metrics import exposition
    except ModuleNotFoundError:
        return None
    return exposition(watch)
