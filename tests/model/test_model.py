"""The quick bound: the whole guard set breaks nothing, and each fault variant breaks what it is there for."""

from __future__ import annotations

import pytest

from fencepost.jobs import states as on
from model.explore import search
from model.invariants import INVARIANTS
from model.variants import QUICK, VARIANTS, Variant
from model.world import Scenario


@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.name)
def test_with_every_guard_nothing_breaks_and_what_stops_has_an_owner(scenario: Scenario) -> None:
    explored = search(scenario)

    assert explored.found is None, explored.found
    assert explored.states > 100


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_guard_that_is_removed_breaks_its_invariant(variant: Variant) -> None:
    found = search(variant.scenario, variant.off, (variant.breaks,)).found

    assert found is not None and found.broken == variant.breaks


def test_every_invariant_is_broken_by_some_variant_or_cannot_be_seen_to_break() -> None:
    broken = {variant.breaks for variant in VARIANTS}
    # I2, I5, I13 and I16 hold wherever the others do: the full run shows which guards they lean on.
    assert set(INVARIANTS) - broken <= {"I2", "I4", "I5", "I13", "I16"}


def test_every_guard_has_a_name_of_its_own_and_every_variant_too() -> None:
    assert len({guard.value for guard in on.Guard}) == len(on.Guard)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
