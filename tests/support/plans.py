"""What PostgreSQL tells about how it ran a statement."""

from collections.abc import Iterable
from itertools import takewhile
from typing import LiteralString

WHOLE: LiteralString = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) "


def pages(plan: Iterable[tuple[str]]) -> int:
    """How many pages the statement touched, without those of the catalogue that its planning read."""
    lines = takewhile(lambda line: not line.startswith("Planning:"), (line for (line,) in plan))
    return max(_buffers(line) for line in lines if "Buffers: shared" in line)


def _buffers(line: str) -> int:
    return sum(int(word.partition("=")[2]) for word in line.split() if word.startswith(("hit=", "read=")))
