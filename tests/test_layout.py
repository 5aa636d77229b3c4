"""The layout that keeps five source roots under one import name working."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PORTIONS = ("schemas", "relay", "consumer", "jobs", "operate")


def test_no_file_turns_the_namespace_into_a_package() -> None:
    # One such file makes the other portions vanish from an editable install.
    assert [str(path) for path in ROOT.glob("*/fencepost/__init__.py")] == []


def test_only_the_known_folders_hold_a_portion() -> None:
    assert {path.parent.name for path in ROOT.glob("*/fencepost")} == set(PORTIONS)


@pytest.mark.parametrize("portion", PORTIONS)
def test_each_portion_holds_exactly_one_typed_package_named_after_its_folder(portion: str) -> None:
    inside = [path for path in (ROOT / portion / "fencepost").iterdir() if path.name != "__pycache__"]

    assert [path.name for path in inside] == [portion]
    assert (inside[0] / "__init__.py").is_file()
    assert (inside[0] / "py.typed").is_file()


def test_tests_mirror_the_portions() -> None:
    assert [portion for portion in PORTIONS if not (ROOT / "tests" / portion).is_dir()] == []
