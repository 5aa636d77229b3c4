"""Every fault variant of the protocol: the guards it removes, the invariant that must break, and where to look for it."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.jobs.states import Guard, JobClass
from model.world import Scenario

ONE = Scenario("one strict job, one opaque effect")
CALM = ONE._replace(name="nothing goes wrong", faults=0)
ROTATED = ONE._replace(name="one rotation", rotations=1, faults=1)
RESTORED = ONE._replace(name="one restore", restores=1, faults=1)
RESTORED_TWO_FAULTS = RESTORED._replace(name="one restore, two faults", faults=2)
OLD_BACKUP = ONE._replace(name="one restore, two rotations", restores=1, rotations=2, faults=0)
UNBORN = RESTORED._replace(name="one restore from before the job", born=False, faults=0)
SIGNALLED = ONE._replace(name="a job that waits for a signal", signals=1, faults=1)
POISONED = ONE._replace(name="one attempt", job_class=JobClass("strict", 1, 1), faults=1)
RESUMABLE = Scenario("a resumable job, two effects", JobClass("resumable", 9, 9), ("opaque", "keyed"), faults=1)
ESCALATED = ONE._replace(name="escalation", also=("escalate",), faults=1)


class Variant(NamedTuple):
    name: str
    off: frozenset[Guard]
    breaks: tuple[str, ...]
    scenario: Scenario
    what: str


def _variant(name: str, breaks: str, scenario: Scenario, what: str, *off: Guard) -> Variant:
    return Variant(name, frozenset(off), tuple(breaks.split()), scenario, what)


VARIANTS: tuple[Variant, ...] = (
    _variant("F1", "I1", ONE, "publish checks only that the job is running", Guard.PUBLISH_FENCE),
    _variant(
        "F2", "I1", ROTATED, "no epoch in the fence, running on after a rotation", Guard.FENCE_EPOCH, Guard.ROTATE_HOLDS
    ),
    _variant("F4", "I6", ONE, "claim ignores pending and unknown", Guard.CLAIM_OPEN),
    _variant("F5", "I3", ONE, "begin ignores the state of the effect", Guard.BEGIN_STATE),
    _variant("F6", "I11", ONE, "the reaper queues a pending effect's job again", Guard.LEAVE_UNKNOWN),
    _variant("F7", "I11", ONE, "a timeout is recorded as failed before dispatch", Guard.TIMEOUT_UNKNOWN),
    _variant("F8", "I11", ONE, "an outcome is not bound to its effect attempt", Guard.RECORD_BOUND),
    _variant("F9", "I3 I5", ONE, "cancel erases effects", Guard.CANCEL_KEEPS),
    _variant(
        "F10",
        "I1",
        ONE,
        "cancel keeps generation and lease, and the fence does not look at the state",
        Guard.CANCEL_REVOKES,
        Guard.FENCE_STATE,
    ),
    _variant("F11", "I11", ONE, "not applied without quiescence", Guard.QUIESCENCE),
    _variant("F12", "I11 I10", ONE, "a lookup that times out makes up an answer", Guard.EVIDENCE),
    _variant("F13", "I11 I4", ONE, "dispatch before the record commits", Guard.RECORD_FIRST),
    _variant("F14", "I1 I2", ONE, "check and write of a publication in two transactions", Guard.PUBLISH_ATOMIC),
    _variant("F15", "I12", ONE, "renewal without fence", Guard.RENEW_FENCE),
    _variant("F16", "I9", ROTATED, "begin ignores the freeze", Guard.BEGIN_FROZEN),
    _variant("F17", "I7", ONE, "completion with an open effect", Guard.PUBLISH_CLOSED),
    _variant("F18", "I8", OLD_BACKUP, "a restored database goes on by itself", Guard.RESTORE_DISARMS),
    _variant("F18b", "I8", OLD_BACKUP, "disarmed, but nobody tests the ticket", Guard.ARMED),
    _variant("F19", "I11", RESTORED, "recovery suspects no intents", Guard.RECOVER_SUSPECTS),
    _variant("F20", "I8", OLD_BACKUP, "the new epoch is counted from the database", Guard.RECOVER_WITNESS),
    _variant("F22", "I3 I16", CALM, "a projector can reach the provider", Guard.PROJECTOR),
    _variant("F23", "I11", RESTORED_TWO_FAULTS, "recovery keeps effect attempts", Guard.RECOVER_FORGETS),
    # Beyond the first list.
    _variant("F24", "I15", ONE, "claim also excludes successful effects: nobody may finish", Guard.CLAIM_FINISH),
    _variant(
        "F25", "I11", RESTORED, "recovery takes an old deadline for the deadline of what it lost", Guard.RECOVER_QUIET
    ),
    _variant(
        "F26", "I3", UNBORN, "a job from before the recovery point is submitted again unsuspected", Guard.SUBMIT_SUSPECT
    ),
    _variant(
        "F27",
        "I8",
        ROTATED,
        "a rotation advances the witness of an armed database, and its commit is lost",
        Guard.ROTATE_DISARMS,
    ),
    _variant("F28", "I8", OLD_BACKUP, "arm does not demand equality with the witness", Guard.ARM_EQUALITY),
    _variant("F29", "I14", CALM, "another meaning overwrites", Guard.SUBMIT_MEANING),
    _variant("F30", "I15", SIGNALLED, "a signal before the wait is lost", Guard.SIGNAL_KEPT),
    _variant("F31", "I10", ESCALATED, "an escalation resolves", Guard.ESCALATE_TELLS),
    _variant("F32", "I11", ONE, "dispatch after the deadline", Guard.DISPATCH_DEADLINE),
    _variant("F33", "I3", RESTORED, "a suspect job begins what nobody has reconciled", Guard.BEGIN_SUSPECT),
    _variant("REJECT", "I15", CALM, "everything is refused", Guard.ACCEPTS),
)

# A few seconds together, for every run of the tests.
QUICK: tuple[Scenario, ...] = (ONE, ROTATED, RESTORED, UNBORN, SIGNALLED, POISONED, RESUMABLE, ESCALATED)
ALSO = ONE._replace(name="one restore, one rotation", restores=1, rotations=1, faults=0)

# The full bound: every combination of so many faults, rotations and restores.
FULL: tuple[Scenario, ...] = (
    ONE._replace(
        name="one opaque effect, four epochs: 1 fault, 2 rotations, 1 restore", faults=1, rotations=2, restores=1
    ),
    ONE._replace(name="one opaque effect, 2 restores, 1 rotation", faults=0, rotations=1, restores=2),
    ONE._replace(name="one opaque effect, 2 faults, 2 rotations", faults=2, rotations=2),
    ONE._replace(name="one opaque effect, crashes: 4 faults", faults=4, also=("crash",)),
    ONE._replace(name="one keyed effect, 2 faults, 1 restore", kinds=("keyed",), faults=2, restores=1),
    ONE._replace(
        name="witness out of reach and restarts: 1 fault, 1 rotation, 1 restore",
        faults=1,
        rotations=1,
        restores=1,
        also=("unreachable", "restart"),
    ),
    RESUMABLE._replace(name="resumable, an opaque and a keyed effect: 2 faults", faults=2),
    RESUMABLE._replace(name="resumable, an opaque and a keyed effect: 1 fault, 1 rotation", faults=1, rotations=1),
    UNBORN._replace(name="restored from before the job: 1 fault, 1 rotation", faults=1, rotations=1),
    SIGNALLED._replace(
        name="waiting for a signal, claims given back: 2 faults, 1 rotation", faults=2, rotations=1, also=("give back",)
    ),
    POISONED._replace(name="two attempts, one finish: 3 faults", job_class=JobClass("strict", 2, 1), faults=3),
    ESCALATED._replace(name="escalation: 2 faults", faults=2),
)
