"""Which functions carry guards, and which tests are likely to notice that one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mutation.predicates import Function, functions

# What tries guards one by one, and each act beside its neighbours.
ALL = ("jobs/test_guard_refusals.py", "jobs/test_guard_edges.py", "jobs/test_guard_effects.py", "jobs/test_guards.py")
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Area:
    """Functions by file, each file with the tests that are tried first; then every other test of `tests` that is quick."""

    folders: tuple[str, ...]
    guards: dict[str, tuple[str, ...]]
    first: dict[str, tuple[str, ...]]
    tests: tuple[str, ...]
    tables: bool


JOBS = Area(
    ("jobs", "effects", "authority"),
    {
        "jobs/fence.sql": ("_fence", "fence", "complete", "_publication_guard"),
        "jobs/claim.sql": ("_reap", "_leave", "_take", "claim", "renew", "fail", "release"),
        "jobs/complete_many.sql": ("complete_many",),
        "jobs/submit.sql": ("submit",),
        "jobs/cancel.sql": ("cancel", "requeue"),
        "jobs/published.sql": ("published", "begun"),
        "jobs/stage.sql": ("stage", "staged"),
        "jobs/protect.sql": ("_require_fence", "_protected_truncate", "_make_guard"),
        "effects/begin_effect.sql": ("begin_effect",),
        "effects/record_effect.sql": ("_forget", "_expire_effects", "_settle", "_dispute", "record_effect"),
        "effects/reconcile.sql": ("reconcile",),
        "effects/decide.sql": ("_decided", "_decide"),
        "effects/look_up.sql": ("take_lookups", "settle_lookup", "defer_lookup"),
        "effects/present.sql": ("present_begin",),
        "effects/escalate.sql": ("_hold_unknown", "escalate_effects", "assign_effect"),
        "authority/enter.sql": ("armed", "_enter", "_epoch"),
    },
    {
        "jobs/fence.sql": (*ALL, "jobs/test_fence.py", "jobs/test_cancel.py"),
        "jobs/claim.sql": (*ALL, "jobs/test_lease_pointers.py", "jobs/test_claim.py", "jobs/test_fence.py", "jobs/test_hot_path.py", "jobs/test_lifecycle.py", "jobs/test_queues.py", "jobs/test_shares.py", "jobs/test_limits.py"),
        "jobs/complete_many.sql": (*ALL, "jobs/test_hot_path.py"),
        "jobs/submit.sql": ("jobs/test_guard_refusals.py", "jobs/test_submit.py"),
        "jobs/cancel.sql": (*ALL, "jobs/test_cancel.py", "jobs/test_archive.py", "jobs/test_claim.py", "jobs/test_lifecycle.py"),
        "jobs/published.sql": (*ALL, "jobs/test_publish.py", "jobs/test_effects.py"),
        "jobs/stage.sql": (*ALL, "jobs/test_fence.py", "jobs/test_archive.py"),
        "jobs/protect.sql": ("jobs/test_protect.py", "jobs/test_manifest.py"),
        "effects/begin_effect.sql": (*ALL, "jobs/test_effects.py", "jobs/test_reconciliation.py"),
        "effects/record_effect.sql": (*ALL, "jobs/test_guard_lookups.py", "jobs/test_effects.py", "jobs/test_variants.py"),
        "effects/reconcile.sql": (*ALL, "jobs/test_effects.py", "jobs/test_reconciliation.py"),
        "effects/decide.sql": (*ALL, "jobs/test_reconciliation.py"),
        "effects/look_up.sql": (*ALL, "jobs/test_guard_lookups.py", "jobs/test_lookup.py"),
        "effects/present.sql": (*ALL, "jobs/test_guard_lookups.py", "jobs/test_journal_worker.py"),
        "effects/escalate.sql": (*ALL, "jobs/test_guard_lookups.py", "jobs/test_reconciliation.py"),
        "authority/enter.sql": ("jobs/test_guard_edges.py", "jobs/test_guards.py", "jobs/test_fence.py", "jobs/test_submit.py", "schemas/test_arming.py"),
        "tables": (*ALL, "jobs/test_archive.py", "jobs/test_claim.py", "jobs/test_fence.py", "jobs/test_reconciliation.py", "jobs/test_hot_path.py"),
    },
    (
        *ALL, "jobs/test_lease_pointers.py", "jobs/test_fence.py", "jobs/test_variants.py", "jobs/test_effects.py", "jobs/test_claim.py", "jobs/test_hot_path.py",
        "jobs/test_cancel.py", "jobs/test_submit.py", "jobs/test_publish.py", "jobs/test_reconciliation.py", "jobs/test_lookup.py",
        "jobs/test_protect.py", "jobs/test_manifest.py", "jobs/test_journal_worker.py", "jobs/test_effect_faults.py", "jobs/test_lifecycle.py",
        "jobs/test_worker.py", "operate/test_effects_and_jobs.py", "model/test_conformance.py",
    ),
    tables=True,
)  # fmt: skip
INBOX = Area(
    ("inbox",),
    {
        "inbox/reserve.sql": ("_is_plain_reservation", "_require_reservable", "reserve", "_judge_reservation"),
        "inbox/reserve_many.sql": ("_batch_is_settled", "reserve_many", "settle_batch"),
        "inbox/purge.sql": ("advance_horizon", "purge_reservations", "purge_deliveries"),
        "inbox/retention.sql": ("set_inbox_retention", "keep_type"),
        "inbox/dead_letter.sql": ("_require_coordinates", "dead_letter"),
        "inbox/retry_dead_letter.sql": ("_lock_dead_letter", "retry_dead_letter", "take_dead_letter", "settle_dead_letter"),
        "inbox/discard_dead_letter.sql": ("discard_dead_letter", "read_dead_letter"),
    },
    {
        "inbox/reserve.sql": ("consumer/test_guards.py", "consumer/test_delivery_rows.py", "consumer/test_contract.py"),
        "inbox/reserve_many.sql": ("consumer/test_guards.py", "consumer/test_delivery_rows.py", "consumer/test_batch.py"),
        "inbox/purge.sql": ("consumer/test_guards.py", "consumer/test_retention.py"),
        "inbox/retention.sql": ("consumer/test_guards.py", "consumer/test_retention.py"),
        "inbox/dead_letter.sql": ("consumer/test_guards.py", "consumer/test_dead_letters.py"),
        "inbox/retry_dead_letter.sql": ("consumer/test_guards.py", "consumer/test_dead_letters.py"),
        "inbox/discard_dead_letter.sql": ("consumer/test_guards.py", "consumer/test_dead_letters.py"),
    },
    (
        "consumer/test_guards.py", "consumer/test_delivery_rows.py", "consumer/test_contract.py", "consumer/test_batch.py", "consumer/test_retention.py",
        "consumer/test_dead_letters.py", "consumer/test_inbox.py",
    ),
    tables=False,
)  # fmt: skip
ARCHIVE = Area(
    ("jobs",),
    {"jobs/archive.sql": ("_finished", "archive_jobs", "_archived_only", "drop_archives")},
    {"jobs/archive.sql": ("jobs/test_archive.py",)},
    ("jobs/test_archive.py",),
    tables=False,
)
RIGHTS = Area(
    ("authority",),
    {
        "authority/within.sql": ("within",),
        "authority/principals.sql": ("register_principal", "grant_principal", "revoke_principal", "_change_principal"),
    },
    {"authority/within.sql": ("jobs/test_within.py",), "authority/principals.sql": ("jobs/test_within.py",)},
    ("jobs/test_within.py",),
    tables=False,
)
AREAS = {"jobs": JOBS, "inbox": INBOX, "archive": ARCHIVE, "rights": RIGHTS}


def written(area: Area) -> list[Function]:
    """Every function of the folders of this area, as its file has it now."""
    root = files("fencepost.schemas") / "sql" / "functions"
    found: list[Function] = []
    for folder in area.folders:
        for entry in sorted((root / folder).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".sql"):
                found += functions(f"{folder}/{entry.name}", entry.read_text())
    return found


def guards(area: Area) -> list[Function]:
    """The functions of an area that carry guards; fails when one is no longer where it was."""
    there = {(function.file, function.name): function for function in written(area)}
    return [there[file, name] for file, names in area.guards.items() for name in names]
