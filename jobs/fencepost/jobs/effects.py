"""Effects: recorded and committed as pending before anything leaves the process, settled only by what is certain.

Certain are a receipt, and a failure that the call itself declares to be before dispatch. An exception, a timeout, a
cancellation, an odd answer are not: the effect is unknown until evidence says otherwise, and nothing dispatches it again
meanwhile.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, LiteralString, cast
from uuid import UUID, uuid5

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.stage import dump, load
from fencepost.schemas.content import canonical
from fencepost.schemas.errors import InvalidInput, NotDispatched
from fencepost.schemas.identity import EffectAttempt, as_effect_key, as_name
from fencepost.schemas.jsonable import jsonable

__all__ = [
    "BEGIN",
    "READ_BACK",
    "RECORD",
    "Begun",
    "Dispatch",
    "Kind",
    "NotSent",
    "Outcome",
    "Recorded",
    "State",
    "Success",
    "Unclear",
    "attempt_key",
    "begin",
    "begun",
    "idempotency_key",
    "reconcile_command",
    "record",
    "request_bytes",
    "request_digest",
]

Kind = Literal["keyed", "lookup", "opaque"]
Outcome = Literal["success", "failed_before_dispatch", "unknown"]
State = Literal["success", "failed_before_dispatch", "unknown", "resolved_applied", "superseded"]

RECEIPT_CHARS_MAX = 2000
NAMESPACE = UUID("6b5f5a0e-93f5-5f0e-9b43-1d6c0e0d6a11")

BEGIN: LiteralString = """
SELECT outcome, timeout_ms, lease_ms, receipt, result, version FROM fencepost.begin_effect(
    %(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s,
    %(effect_key)s, %(kind)s, %(effect_attempt)s, %(request_digest)s, %(timeout)s)"""
READ_BACK: LiteralString = """
SELECT fencepost.begun(%(tenant)s, %(operation)s, %(class)s, %(effect_key)s, %(effect_attempt)s)"""
RECORD: LiteralString = """
SELECT fencepost.record_effect(%(tenant)s, %(operation)s, %(effect_key)s, %(effect_attempt)s, %(outcome)s,
                               %(receipt)s, %(result)s, %(reason)s)"""


@dataclass(frozen=True, slots=True)
class Success:
    """The provider's own evidence that the effect happened: the only answer that counts as one.

    ``receipt`` is its reference (1 to 2000 characters); ``result`` is JSON that a later attempt gets back with it.
    """

    receipt: str
    result: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if type(self.receipt) is not str or not 1 <= len(self.receipt) <= RECEIPT_CHARS_MAX or "\0" in self.receipt:
            raise InvalidInput(f"a receipt is text of 1 to {RECEIPT_CHARS_MAX} characters", field="receipt")
        try:
            self.receipt.encode()
        except UnicodeEncodeError:
            raise InvalidInput("a receipt holds a lone surrogate", field="receipt") from None


class NotSent(NotDispatched):
    """Raised by a call that certainly sent nothing; ``reason`` is a code, never content. The effect may be tried again."""

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(f"nothing was sent to the provider: {as_name(reason, 'reason')}", field="provider")
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason,)


class Unclear(Exception):
    """Raised by a call whose outcome nobody knows, with a code that says why; as unknown as after any other exception."""

    def __init__(self, reason: str) -> None:
        super().__init__(as_name(reason, "reason"))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a call may tell the provider, and how long it may take.

    ``effect_attempt`` names this one begin. ``idempotency_key`` stays the same for every begin of the effect: a
    provider that honours it accepts at most once. ``kind`` is the effect's.
    """

    effect_attempt: EffectAttempt
    idempotency_key: str
    deadline: float
    kind: Kind = "opaque"

    @property
    def request_key(self) -> str:
        """What an ``Idempotency-Key`` header should say: stable for a keyed effect, else of this one begin.

        An effect of another kind is begun again only once its earlier call is certain not to have happened: under a
        key of its own, the provider cannot answer it with the earlier failure.
        """
        return self.idempotency_key if self.kind == "keyed" else attempt_key(self.effect_attempt)

    def seconds_left(self) -> float:
        """Seconds until the call must be over, at least 0; by the monotonic clock, from before the begin."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Begun:
    """Pending and committed once the transaction is: dispatch now, for at most ``timeout`` seconds from before the begin.

    ``lease`` is how long the lease lasts from then, None when it was not read.
    """

    timeout: float
    lease: float | None
    version: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The effect happened already: its receipt, and nothing is to be dispatched."""

    receipt: str
    result: Any = field(repr=False)


def begin(
    conn: Connection[Any],
    f: Fence,
    effect_key: str,
    *,
    kind: Kind,
    effect_attempt: UUID,
    digest: bytes,
    timeout: float,
) -> Begun | Recorded:
    """Records the effect as pending in the caller's transaction; dispatch only after that commit, within ``timeout``.

    ``digest`` is that of the request (32 bytes), ``timeout`` in seconds within the class's maximum. The lease is
    extended past the deadline. Raises StaleFence, EffectOpen while it is pending or unknown, OperationConflict when
    the key was used for another request, EffectLimit (second key in a strict class), FinishOnly, EpochFrozen, NotArmed.
    """
    parameters = f.parameters() | {
        "effect_key": as_effect_key(effect_key),
        "kind": kind,
        "effect_attempt": effect_attempt,
        "request_digest": digest,
        "timeout": timedelta(seconds=timeout),
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(BEGIN, parameters).fetchone()
    assert row is not None
    outcome, timeout_ms, lease_ms, receipt, result, version = row
    if outcome == "recorded":
        return Recorded(receipt=receipt, result=None if result is None else load(bytes(result)))
    return Begun(timeout=timeout_ms / 1000, lease=lease_ms / 1000, version=version)


def begun(conn: Connection[Any], f: Fence, effect_key: str, effect_attempt: UUID) -> int | None:
    """Reads back a begin whose commit was lost: the effect's version if it stands, None if it certainly does not.

    Waits at most five seconds for a transaction that may still commit; then raises psycopg.errors.LockNotAvailable.
    """
    parameters = f.parameters() | {"effect_key": effect_key, "effect_attempt": effect_attempt}
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(READ_BACK, parameters).fetchone()
    assert row is not None
    return cast("int | None", row[0])


def record(
    conn: Connection[Any],
    f: Fence,
    effect_key: str,
    effect_attempt: UUID,
    outcome: Outcome,
    *,
    receipt: str | None = None,
    result: object = None,
    reason: str | None = None,
) -> State:
    """Records what became of this begin, in the caller's transaction; needs the effect attempt, not the lease.

    Returns the state of the effect: a receipt against "not applied" leaves it unknown and contradicted; superseded
    means that the effect was begun again since, and the late receipt was kept as evidence only. Raises
    StaleEffectAttempt when the effect is settled or bound to another begin, EvidenceMissing for success without a
    receipt, NotArmed.
    """
    parameters = {
        "tenant": f.tenant,
        "operation": f.operation,
        "effect_key": effect_key,
        "effect_attempt": effect_attempt,
        "outcome": outcome,
        "receipt": receipt,
        "result": None if result is None else dump(result, "result"),
        "reason": reason,
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(RECORD, parameters).fetchone()
    assert row is not None
    return cast(State, row[0])


def idempotency_key(tenant: str, operation: str, effect_key: str) -> str:
    """A text that is the same for every begin of this effect and for no other effect; holds none of its parts."""
    parts = (tenant, operation, effect_key)
    return str(uuid5(NAMESPACE, "".join(f"{len(part)}:{part}" for part in parts)))


def attempt_key(effect_attempt: UUID) -> str:
    """A text that is the same for one begin only, and can be told from every key that is stable."""
    return f"attempt-{effect_attempt}"


def request_digest(request: Mapping[str, object] | bytes) -> bytes:
    """sha256 of the request's canonical bytes: the same request gives the same digest; InvalidInput naming the member.

    A mapping must be JSON of the restricted profile (no floating point); bytes are taken as they are.
    """
    return sha256(request_bytes(request)).digest()


def request_bytes(request: Mapping[str, object] | bytes) -> bytes:
    """What is digested: bytes as they are, a mapping as canonical JSON. Sent like this, the digest is that of the body."""
    return bytes(request) if isinstance(request, bytes) else canonical(jsonable(request, "request"))


def reconcile_command(f: Fence, effect_key: str, version: int | None, receipt: str | None = None) -> str:
    """The command line that settles this effect once the evidence has been looked up."""
    line = [
        *("fencepost", "effects", "reconcile", "--tenant", shlex.quote(f.tenant)),
        *(
            "--operation",
            shlex.quote(f.operation),
            "--effect",
            shlex.quote(effect_key),
            "--version",
            "N" if version is None else str(version),
        ),
        *("--verdict", "applied|not-applied", "--evidence-kind", "receipt_lookup", "--evidence-ref", "..."),
        f"--receipt {shlex.quote(receipt)}" if receipt is not None else "[--receipt ...]",
    ]
    return " ".join(line)
