"""What processes share on one machine, folders of the cache and ports, is had by one at a time."""

from pathlib import Path

import pytest

from stack import places
from stack.preparing import prepared
from stack.process import Unavailable
from support.processes import Child, wait_for

MAKING = """
import sys, time
from pathlib import Path
from stack.preparing import prepared

def make(scratch):
    (scratch / "made").mkdir()
    print("making", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)
    (scratch / "made" / "whole").touch()
    return scratch / "made"

print("asking", flush=True)
print(*[path.name for path in prepared(Path(sys.argv[1]), make, 30).iterdir()], flush=True)
"""
HOLDING = """
import random, time
from stack import places
# Beyond what is given out at random, and below what the kernel gives to connections.
for first in random.sample(range(32_000, 32_760, 3), 250):
    places.FIRST_PORT, places.LAST_PORT = first, first + 2
    try:
        took = [places.free_port() for _ in range(3)]
    except RuntimeError:
        continue
    print("took", *sorted(took), flush=True)
    break
time.sleep(120)
"""


def never(scratch: Path) -> Path:
    raise AssertionError("made twice")


def test_a_folder_is_made_once_however_many_ask_and_nobody_sees_it_unfinished(tmp_path: Path) -> None:
    folder, go = tmp_path / "folder", tmp_path / "go"
    arguments = [str(folder), str(go)]
    children = [
        Child.script(MAKING, folder=tmp_path / name, arguments=arguments, PYTHONPATH=str(places.COMPOSE))
        for name in ("first", "second")
    ]
    with children[0] as first, children[1] as second:
        wait_for(lambda: "making" in first.text + second.text, 20, "one to make it")
        first.says("asking")
        second.says("asking")
        assert not folder.exists()
        with pytest.raises(Unavailable, match="folder within 0 s"):
            prepared(folder, never, 0)
        go.touch()
        assert (first.wait(), second.wait()) == (0, 0)
        assert (first.text + second.text).count("making") == 1
        assert [child.text.split()[-1] for child in children] == ["whole", "whole"]
    assert prepared(folder, never, 0) == folder


def test_what_failed_or_was_killed_half_way_is_made_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def fail(scratch: Path) -> Path:
        (scratch / "half").touch()
        raise Unavailable("no network")

    with pytest.raises(Unavailable, match="no network"):
        prepared(folder, fail, 0)
    arguments = [str(folder), str(tmp_path / "never")]
    with Child.script(MAKING, folder=tmp_path, arguments=arguments, PYTHONPATH=str(places.COMPOSE)) as child:
        child.says("making")
        with pytest.raises(Unavailable):
            prepared(folder, never, 0)
        child.kill()
    assert prepared(folder, lambda scratch: scratch, 0).is_dir()


def test_a_port_is_given_to_one_process_until_that_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Child.script(HOLDING, folder=tmp_path, PYTHONPATH=str(places.COMPOSE)) as child:
        child.says("took")
        wait_for(lambda: child.text.endswith("\n"), 10, "the whole line")
        took = [int(word) for word in child.text.split()[1:]]
        assert len(set(took)) == 3
        monkeypatch.setattr(places, "FIRST_PORT", took[0])
        monkeypatch.setattr(places, "LAST_PORT", took[2])
        with pytest.raises(RuntimeError, match="no free port"):
            places.free_port()
    assert sorted(places.free_port() for _ in range(3)) == took
