"""What the state machine speaks of: states on three axes, events, what follows from them, and its guards by name.

``machine.step`` is the transition function. Nothing here is used at run time: PostgreSQL's functions are the product, and
tests drive both with the same events and compare them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Policy = Literal["strict", "resumable"]
Exec = Literal["queued", "running", "waiting", "done", "cancelled", "poison", "blocked", "held"]
Mode = Literal["execute", "finish"]
Kind = Literal["keyed", "lookup", "opaque"]
EffectState = Literal[
    "none", "pending", "success", "failed_before_dispatch", "unknown", "resolved_applied", "resolved_not_applied"
]
Outcome = Literal["success", "failed_before_dispatch", "unknown"]
Verdict = Literal["applied", "not_applied"]

APPLIED: tuple[EffectState, ...] = ("success", "resolved_applied")
OPEN: tuple[EffectState, ...] = ("pending", "unknown")
AGAIN: tuple[EffectState, ...] = ("none", "failed_before_dispatch", "resolved_not_applied")


@dataclass(frozen=True, slots=True)
class JobClass:
    policy: Policy = "strict"
    max_attempts: int = 1000
    max_finishes: int = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """The execution axis. Attempts are numbered by whoever drives the machine and never repeat, not even after a restore."""

    meaning: int = 1
    exec: Exec = "queued"
    mode: Mode = "execute"
    generation: int = 0
    attempts: int = 0
    finishes: int = 0
    epoch: int = 1
    attempt: int | None = None
    owner: str | None = None
    expired: bool = False  # the lease has ended by the database's clock
    signalled: bool = False
    suspect: bool = False  # a restore made it doubtful what was begun


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect axis, for one key of the job."""

    kind: Kind = "opaque"
    state: EffectState = "none"
    effect_attempt: int | None = None
    begun_by: int | None = None
    earlier: tuple[int, ...] = ()
    quiescent: bool = True  # no call of this key can be under way any more
    disputed: bool = False  # unknown because a receipt spoke against the decision
    contradicted: bool = False
    escalated: bool = False
    begins: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Authority:
    """The authority axis, as the database holds it."""

    epoch: int = 1
    frozen: bool = False
    armed: bool = True
    tip: bool = True  # the database's tip is the witness's head; a restored copy's never is


@dataclass(frozen=True, slots=True)
class Witness:
    """What is kept outside the database and never restored with it."""

    epoch: int = 1
    intended: bool = False  # the newest epoch is written here, but its commit is not confirmed
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class State:
    job_class: JobClass = field(default_factory=JobClass)
    job: Job | None = None
    effects: tuple[Effect, ...] = ()
    authority: Authority = field(default_factory=Authority)
    witness: Witness = field(default_factory=Witness)

    @property
    def open_effects(self) -> int:
        """How many effects are pending or unknown."""
        return sum(e.state in OPEN for e in self.effects)

    @property
    def applied_effects(self) -> int:
        """How many effects are known to have happened."""
        return sum(e.state in APPLIED for e in self.effects)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a worker holds: its side of the fence."""

    generation: int
    attempt: int
    owner: str
    epoch: int


# Events: the queue's users and workers.


@dataclass(frozen=True, slots=True)
class Submit:
    meaning: int = 1
    below_recovery: bool = False  # its event is older than the point that was recovered to


@dataclass(frozen=True, slots=True)
class Claim:
    attempt: int
    owner: str


@dataclass(frozen=True, slots=True)
class Renew:
    grant: Grant


@dataclass(frozen=True, slots=True)
class Begin:
    grant: Grant
    key: int
    effect_attempt: int


@dataclass(frozen=True, slots=True)
class Record:
    key: int
    effect_attempt: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Publish:
    grant: Grant
    checked: bool = False  # the fence was looked at in an earlier transaction: worthless, unless a guard is off


@dataclass(frozen=True, slots=True)
class Fail:
    grant: Grant
    final: bool = False


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A worker that stops returns its claim, not charged."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Wait:
    grant: Grant


@dataclass(frozen=True, slots=True)
class Signal:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


# Time and maintenance.


@dataclass(frozen=True, slots=True)
class LeaseEnds:
    pass


@dataclass(frozen=True, slots=True)
class Quiesces:
    """The dispatch deadline and the network bound of every begin of this key have passed."""

    key: int


@dataclass(frozen=True, slots=True)
class Reap:
    pass


@dataclass(frozen=True, slots=True)
class Deadline:
    key: int


@dataclass(frozen=True, slots=True)
class Wake:
    pass


@dataclass(frozen=True, slots=True)
class Escalate:
    key: int


@dataclass(frozen=True, slots=True)
class LookupTimesOut:
    key: int


# Operators: reconciler and authority admin.


@dataclass(frozen=True, slots=True)
class Reconcile:
    key: int
    verdict: Verdict
    version: int | None = None  # the one that was looked at; None: the one there is
    attested: bool = False  # somebody attests that the worker's process has ended


@dataclass(frozen=True, slots=True)
class Retry:
    pass


@dataclass(frozen=True, slots=True)
class Rotate:
    commits: bool = True  # False: the witness was advanced, the database's commit was lost


@dataclass(frozen=True, slots=True)
class Thaw:
    pass


@dataclass(frozen=True, slots=True)
class Release:
    pass


@dataclass(frozen=True, slots=True)
class Recover:
    pass


# What befalls the database.


@dataclass(frozen=True, slots=True)
class Restart:
    pass


@dataclass(frozen=True, slots=True)
class Arm:
    pass


@dataclass(frozen=True, slots=True)
class Restore:
    copy: State


@dataclass(frozen=True, slots=True)
class Witnessed:
    reachable: bool


Worker = Claim | Renew | Begin | Record | Publish | Fail | GiveBack | Wait
User = Submit | Signal | Cancel
Maintenance = LeaseEnds | Quiesces | Reap | Deadline | Wake | Escalate | LookupTimesOut
Operator = Reconcile | Retry | Rotate | Thaw | Release | Recover
Outside = Restart | Arm | Restore | Witnessed
Event = Worker | User | Maintenance | Operator | Outside


# Actions: what follows from a transition, for whoever asked.


@dataclass(frozen=True, slots=True)
class Granted:
    grant: Grant
    mode: Mode


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The worker may call the provider now, and only until its deadline."""

    key: int
    effect_attempt: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The effect happened already: here is its receipt, nothing is dispatched."""

    key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changed; the code is the SQLSTATE of the typed refusal, the part what it names."""

    code: str
    part: str


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that is no refusal."""

    answer: str


@dataclass(frozen=True, slots=True)
class Alert:
    """Somebody must look."""

    what: str


Action = Granted | Dispatch | Receipt | Refused | Told | Alert


@dataclass(frozen=True, slots=True)
class Hold:
    """Why the job does not proceed by itself, and who is to do something about it."""

    what: str
    owner: str


class Guard(StrEnum):
    """Everything that can be switched off, to show what it is there for."""

    ACCEPTS = "anything is accepted at all"
    ARMED = "every use of authority tests the ticket"
    FENCE_STATE = "fence: the job is running"
    FENCE_GENERATION = "fence: generation"
    FENCE_ATTEMPT = "fence: attempt"
    FENCE_OWNER = "fence: owner"
    FENCE_EPOCH = "fence: epoch"
    FENCE_LEASE = "fence: unexpired lease"
    PUBLISH_FENCE = "a publication is fenced, not only running"
    PUBLISH_ATOMIC = "check and write of a publication are one transaction"
    PUBLISH_CLOSED = "no publication with an open effect"
    RENEW_FENCE = "a renewal is fenced"
    SUBMIT_MEANING = "the same identity with another meaning is a conflict"
    SUBMIT_SUSPECT = "a job from before the recovery point is suspect"
    CLAIM_EPOCH = "only work of the current epoch is claimed"
    CLAIM_OPEN = "no claim with an open effect"
    CLAIM_BUDGET = "no claim without attempts left"
    SETTLE_BUDGET = "a job whose effects are settled is poison without attempts left"
    CLAIM_FINISH = "a strict job with a receipt can be claimed to finish"
    BEGIN_MODE = "a finish claim begins nothing"
    BEGIN_FROZEN = "no begin while frozen"
    BEGIN_STATE = "no begin of an effect that is open or applied"
    BEGIN_ONE = "a strict job has one effect"
    BEGIN_SUSPECT = "a suspect job begins no key that was not reconciled"
    LEAVE_UNKNOWN = "an attempt that ends leaves a pending effect unknown"
    DEADLINE_OWN = "a pending effect turns unknown only at its own deadline"
    RECORD_BOUND = "an outcome is bound to its effect attempt"
    RECORD_EVIDENCE = "a receipt on record is not overruled by failed before dispatch"
    RECORD_EARLIER = "a receipt of an earlier begin blocks what would be begun again"
    RECORD_DISPUTE = "a receipt against the belief that nothing happened blocks the job"
    CANCEL_KEEPS = "a cancel leaves effects as they are"
    CANCEL_REVOKES = "a cancel takes the job away from its attempt"
    RETRY_CLOSED = "no retry with an open effect"
    SIGNAL_KEPT = "a signal before the wait is kept"
    EVIDENCE = "a lookup that times out is no answer"
    ESCALATE_TELLS = "an escalation resolves nothing"
    QUIESCENCE = "not applied only when the call cannot be under way"
    VERSION = "a decision is about the version that was looked at"
    ROTATE_WITNESS = "a rotation advances the witness first"
    ROTATE_DISARMS = "a rotation disarms before it advances the witness"
    ROTATE_HOLDS = "a rotation takes running jobs away"
    RELEASE_CLOSED = "no release with an open effect"
    RESTORE_DISARMS = "a restored database is disarmed"
    ARM_EQUALITY = "arm demands equality with the witness"
    RECOVER_WITNESS = "the new epoch is counted from the witness"
    RECOVER_SUSPECTS = "a recovery makes every effect that may have been begun again unknown"
    RECOVER_FORGETS = "a recovery clears effect attempts"
    RECOVER_QUIET = "a recovery starts quiescence anew"
    # What the worker's side owes.
    RECORD_FIRST = "dispatch only after the begin has committed"
    DISPATCH_DEADLINE = "no dispatch after the deadline"
    TIMEOUT_UNKNOWN = "a lost reply is recorded as unknown"
    PROJECTOR = "a projector reaches no provider"
