"""What a run of chaos is made of: the classes of jobs, their leases, and decisions that a seed repeats.

Every decision is drawn from the seed and from what it is about, so it does not depend on which process makes it when.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

Kind = Literal["keyed", "lookup", "opaque"]

LEASE = 1.0
EFFECT_SECONDS = 0.6
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 1.3, 2.2
# Later than this a paused worker is killed instead of continued, and the provider drops what it has not accepted.
PAUSE_SECONDS_LIMIT = 2.6
LATE_SECONDS_MAX = 0.9
LATE_SECONDS_LIMIT = 1.4
# A call that began in time may be sent as late as a worker is paused, and accepted as late as the provider takes.
NETWORK_SECONDS = PAUSE_SECONDS_LIMIT + LATE_SECONDS_LIMIT + 2.0

PLAIN, QUIET, KEYED, LOOKUP, OPAQUE, STEPS = (
    "chaos.plain",
    "chaos.quiet",
    "chaos.keyed",
    "chaos.lookup",
    "chaos.opaque",
    "chaos.steps",
)
EFFECTS: dict[str, tuple[tuple[str, Kind], ...]] = {
    PLAIN: (),
    QUIET: (),
    KEYED: (("charge", "keyed"),),
    LOOKUP: (("charge", "lookup"),),
    OPAQUE: (("charge", "opaque"),),
    STEPS: (("reserve", "keyed"), ("charge", "lookup"), ("notify", "opaque")),
}
SHARES = ((PLAIN, 0.2), (QUIET, 0.1), (KEYED, 0.2), (LOOKUP, 0.2), (OPAQUE, 0.15), (STEPS, 0.15))
PUBLISHING = frozenset(EFFECTS) - {QUIET}
TENANTS = 4
BAD = "bad_input"


def chance(seed: int, *about: object) -> float:
    """At least 0 and less than 1; the same for the same seed and the same words."""
    text = "\x1f".join(str(part) for part in (seed, *about))
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big") / (1 << 56)


def class_of(seed: int, operation: str) -> str:
    """Which kind of job an operation is."""
    drawn = chance(seed, "class", operation)
    for name, share in SHARES:
        drawn -= share
        if drawn < 0:
            return name
    return PLAIN


def tenant_of(seed: int, operation: str) -> str:
    """Whose an operation is."""
    return f"t{int(chance(seed, 'tenant', operation) * TENANTS)}"


def subject(operation: str, effect_key: str) -> str:
    """What the provider's ledger calls an effect: the same for every request that means it."""
    return f"{operation}/{effect_key}"


def computing(seed: int, operation: str, attempt: int) -> float:
    """How many seconds an attempt computes. One operation in eight is slow each time, some longer than a lease: there a
    worker that was stopped meets its successor at work."""
    drawn = chance(seed, "seconds", operation, attempt)
    return 0.3 + 2.2 * drawn if chance(seed, "slow", operation) < 0.12 else 0.005 + 0.04 * drawn
