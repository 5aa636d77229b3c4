"""A short form of chaos and soak: every kind of fault once, then rest, and no answer was wrong."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.chaos.engine import Engine, Options
from bench.chaos.faults import KINDS
from bench.chaos.stage import Stage
from bench.chaos.systems import Fencepost

OPTIONS = Options(jobs=120, seconds=200, workers=2, concurrency=8, pace=0.0, every=10, each_once=True)


@pytest.mark.timeout(480)
def test_no_answer_is_wrong_after_every_kind_of_fault() -> None:
    said: list[str] = []
    with Stage(7) as stage:
        found = Engine(Fencepost(), stage, OPTIONS, said.append).run()
    assert found.wrong.none() and not found.ended, (found, said)
    assert set(found.faults) == set(KINDS), "some fault was never committed"
    assert found.accepted >= OPTIONS.jobs
    # The faults bit: claims were taken over, and outcomes were lost.
    assert found.survived["attempts"] > found.accepted
    assert found.survived["effects became unknown"] > 0
