"""What processes share on one machine, folders of the cache and ports, is had by one at a time."""

import socket
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
import sys, time
from stack import places
places.FIRST_PORT, places.LAST_PORT = int(sys.argv[1]), int(sys.argv[2])
print("took", *[places.free_port() for _ in range(places.FIRST_PORT, places.LAST_PORT + 1)], flush=True)
time.sleep(120)
"""
# Beyond what is given out at random, and below what the kernel gives to connections.
WINDOW = range(32_000, 32_760)


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
    first = next(port for port in WINDOW[::3] if all(free(port + n) for n in range(3)))
    monkeypatch.setattr(places, "FIRST_PORT", first)
    monkeypatch.setattr(places, "LAST_PORT", first + 2)
    arguments = [str(first), str(first + 2)]
    with Child.script(HOLDING, folder=tmp_path, arguments=arguments, PYTHONPATH=str(places.COMPOSE)) as child:
        child.says("took")
        assert sorted(map(int, child.text.split()[1:])) == [first, first + 1, first + 2]
        with pytest.raises(RuntimeError, match="no free port"):
            places.free_port()
    assert sorted(places.free_port() for _ in range(3)) == [first, first + 1, first + 2]


def free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((places.LOOPBACK, port))
        except OSError:
            return False
    return True
