"""Health beside a command: an address that was chosen must be had, the default one is done without where it is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from fencepost.operate.settings import ConsumerSettings, WorkerSettings
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.health import HealthAddress

__all__ = ["health"]

OFF = "off"

log = logging.getLogger("fencepost.operate")


@contextmanager
def health(
    section: str,
    chosen: ConsumerSettings | WorkerSettings,
    serving: Callable[[HealthAddress], AbstractContextManager[object]],
) -> Generator[None]:
    """Health is served while the block runs; ConfigError with the field as it is in the settings."""
    if chosen.health_address == OFF:
        yield
        return
    try:
        served = serving(HealthAddress.parse(chosen.health_address, exposed=chosen.health_exposed))
        served.__enter__()
    except ConfigError as error:
        if "health_address" in chosen.model_fields_set:
            raise ConfigError(error.message, field=f"{section}.{error.field}", hint=error.hint) from None
        log.warning("no health is served: %s", error)
        yield
        return
    try:
        yield
    finally:
        served.__exit__(None, None, None)
