"""The tables of faults name tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_[a-z0-9_]+)`")


def test_every_fault_names_tests_and_every_named_test_exists() -> None:
    sections = (HERE / "FAULTS.md").read_text().split("\n# ")
    tables = [
        [line for line in section.splitlines() if line.startswith("|") and not line.startswith(("|---", "| fault |"))]
        for section in sections
    ]
    assert [len(table) >= 19 for table in tables] == [True] * 3
    rows = [row for table in tables for row in table]
    sources = {path: path.read_text() for path in HERE.rglob("test_*.py")}
    for row in rows:
        named = NAMED.findall(row)
        assert named and row.count("::") == len(named), row
        missing = [(path, name) for path, name in named if f"def {name}(" not in sources.get(HERE / path, "")]
        assert not missing
