"""Mutants that no test can tell from the original, each with what implies the predicate that was removed."""

EQUIVALENT: dict[str, str] = {}
