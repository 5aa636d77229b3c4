"""The quick bound: the whole guard set breaks nothing, and each fault variant breaks what it is there for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from model.explore import search
from model.invariants import INVARIANTS
from model.variants import QUICK, VARIANTS, Variant
from model.world import Scenario

HERE = Path(__file__).parent
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_[a-z0-9_]+)`")


@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.name)
def test_with_every_guard_nothing_breaks_and_what_stops_has_an_owner(scenario: Scenario) -> None:
    explored = search(scenario, fold=True)

    assert explored.found is None, explored.found
    assert explored.states > 100


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_guard_that_is_removed_breaks_its_invariants(variant: Variant) -> None:
    for name in variant.breaks:
        found = search(variant.scenario, variant.off, (name,), fold=True).found

        assert found is not None and found.broken == name


def test_every_invariant_is_broken_by_some_variant_but_the_one_that_no_single_guard_upholds() -> None:
    broken = {name for variant in VARIANTS for name in variant.breaks}

    assert set(INVARIANTS) - broken == {"I13"}


def test_the_table_of_pairs_names_every_variant_and_tests_that_exist() -> None:
    rows = [line for line in (HERE / "PAIRS.md").read_text().splitlines() if line.startswith(("| F", "| REJECT"))]
    assert [row.split("|")[1].strip() for row in rows] == [variant.name for variant in VARIANTS]
    sources = {path: path.read_text() for path in HERE.parent.rglob("test_*.py")}
    for row in rows:
        named = NAMED.findall(row)
        assert named or "part of restore" in row or "of the model" in row, row
        missing = [(path, name) for path, name in named if f"def {name}(" not in sources.get(HERE.parent / path, "")]
        assert not missing
