"""How fast a relay goes, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import ParkReason
from fencepost.schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a relay, in seconds, and its limits.

    `lease` bounds how long a dead relay holds its slots; `confirm` how long one send may wait for the broker; `poll_min`
    and `poll_max` the adaptive pause when nothing is new; `drain` the time to finish after a stop; `answer` how long the
    database may take over one statement. About `batch` events are read at once (where all slots have some), `ahead` batches may wait for their confirms.
    Progress of a slot without events is recorded every `record` seconds; `recycle` is the pause between two looks for
    what can be recycled.
    """

    lease: float = 30.0
    refresh: float = 2.0
    confirm: float = 10.0
    poll_min: float = 0.005
    poll_max: float = 0.5
    drain: float = 10.0
    answer: float = 15.0
    batch: int = 2000
    ahead: int = 4
    record: float = 60.0
    recycle: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.lease <= self.confirm + self.refresh:
            raise ConfigError(
                "the lease is not longer than one confirm and one refresh together",
                field="lease",
                hint="raise the lease, or lower the confirm timeout: what is sent must be answered while the lease lasts",
            )


@dataclass(slots=True)
class Counters:
    """What this loop did since it started."""

    published: int = 0
    parked: int = 0
    resent: int = 0
    pages: int = 0
    acks: int = 0
    lost_slots: int = 0
    overtaken: int = 0
    reasons: Counter[ParkReason] = field(default_factory=Counter[ParkReason])
    trouble: str = ""
