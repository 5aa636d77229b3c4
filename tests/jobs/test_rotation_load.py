"""A short form of the rotations under load: no bound on time, but nothing of an old epoch commits after a rotation did."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.rotation import cost
from bench.rotation.load import Load, Size, workers

from fencepost.schemas import migrate
from support.database import Database

SIZE = Size(jobs=300, workers=3)


def test_nothing_of_an_old_epoch_commits_after_a_rotation_while_workers_publish(
    database18: Database, tmp_path: Path
) -> None:
    with database18.connect(autocommit=True) as conn:
        load = Load(database18, conn, SIZE)
        load.prepare()
        load.fill()
        with workers(load, tmp_path):
            load.publishing()
            for _ in range(2):
                load.fill()
                turned = load.rotate()
                assert turned.queued >= SIZE.jobs
                assert load.release().jobs >= turned.queued
                load.publishing()
        assert [each.epoch for each in load.turned] == [2, 3]
        # None of the workers, and the one that was written around the fence.
        assert [load.late(each) for each in load.turned] == [(0, 1), (0, 1)]
        # The control: each epoch had its turn.
        assert [load.published(epoch).workers for epoch in (1, 2, 3)] == [SIZE.workers] * 3
        assert load.twice() == 0


def test_the_price_is_that_of_the_shipped_fence_or_of_nothing() -> None:
    texts = [cost.derived(variant) for variant in cost.VARIANTS]
    assert texts[0] in [each.text for each in migrate.functions()]
    assert len(texts[0]) > len(texts[1]) > len(texts[2])
    assert b"_enter" in texts[0] and b"_enter" not in texts[1]
    with pytest.raises(AssertionError, match="0 times, not 1: something else"):
        cost.derived(cost.Variant("of another version", (cost.Cut("something else", 1),)))
