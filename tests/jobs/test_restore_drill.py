"""A short form of the restore drill: one kind of restore from the first claim to publishing again, on a server of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.restore_drill.checks import Checks
from bench.restore_drill.kinds import DumpNew
from bench.restore_drill.story import Drill


@pytest.mark.timeout(300)
def test_a_dump_in_a_new_database_publishes_again_only_after_evidence_and_under_a_new_epoch() -> None:
    with DumpNew() as kind:
        drill = Drill(kind)
        checks = drill.run()
    assert checks.wrong == []
    # Something was looked at in every step, and something had been sent that the copy knew nothing of.
    assert set(checks.made) == set(range(1, 9)) and drill.dispatched == 4


def test_a_check_that_does_not_hold_is_told() -> None:
    checks = Checks()
    checks.refused(1, "control", ValueError, lambda: int("x"))
    assert checks.wrong == []
    checks.refused(2, "another", KeyError, lambda: int("x"))
    checks.refused(3, "allowed", KeyError, lambda: 1)
    checks.allowed(4, "refused", lambda: int("x"))
    checks.holds(5, "false", False, "found")
    assert [line[:10] for line in checks.wrong] == ["2: another", "3: allowed", "4: refused", "5: false: "]
