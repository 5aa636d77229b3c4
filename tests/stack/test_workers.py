"""Several processes run the tests: each on services of its own, told together at the end, and nothing is left behind."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from stack import guard, places
from support.processes import Child, wait_for

TESTS = Path(__file__).parents[1]
USING = """
import os, pathlib
FOLDER = pathlib.Path(__file__).parent

def test_postgres(pg18):
    (FOLDER / f"address-{os.getpid()}").write_text(pg18.address)

def test_rabbitmq(rabbitmq):
    pass
"""
ENDLESS = """
import os, pathlib, time
from stack import ownership, places
FOLDER = pathlib.Path(__file__).parent

def test_endless(pg18):
    told = f"{os.getpid()} {pg18.node.pid} {ownership._guard.pid} {places.run_folder()}"
    (FOLDER / f"new-{os.getpid()}").write_text(told)
    (FOLDER / f"new-{os.getpid()}").rename(FOLDER / f"running-{os.getpid()}")
    time.sleep(120)
"""
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background may have inherited deaf ears
sys.exit(pytest.main())
"""
NOTHING = "def test_nothing(): pass"
NO_RABBITMQ = "RabbitMQ: not found; as root on Debian run compose/install"


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Child]:
    """A pytest with this project's fixtures, in a process group of its own."""

    def made(source: str, *arguments: str, **env: str) -> Child:
        shutil.copy(TESTS / "conftest.py", tmp_path)
        (tmp_path / "test_it.py").write_text(source)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nfilterwarnings = error\n")
        given = {name: "" for name in os.environ if name.startswith("FENCEPOST_TEST_")}
        paths = f"{TESTS}:{places.COMPOSE}:{os.environ.get('PYTHONPATH', '')}"
        return Child(
            ["-c", PYTEST, "-p", "xdist", "-p", "no:cacheprovider", *arguments, str(tmp_path)],
            output=tmp_path / "output",
            env={
                **given,
                "CI": "",
                "FENCEPOST_NO_STACK": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONPATH": paths,
                **env,
            },
        )

    return made


def test_each_worker_has_services_of_its_own_and_the_end_tells_them_all(
    session: Callable[..., Child], tmp_path: Path
) -> None:
    with session(USING, "-n", "auto", "--dist", "each", PATH="/nowhere") as child:
        assert child.wait(90) == 0, child.text
        lines = child.text.rstrip().splitlines()
    workers = len(list(tmp_path.glob("address-*")))
    assert workers > 1
    assert len({path.read_text() for path in tmp_path.glob("address-*")}) == workers
    assert [line for line in lines if re.fullmatch(r"services: PostgreSQL 18\.\d+", line)]
    assert [line for line in lines if line.startswith("MISSING ")] == [f"MISSING rabbitmq: {NO_RABBITMQ}"]
    assert re.fullmatch(rf"=+ {workers} passed, {workers} skipped in .* =+", lines[-1])


def test_services_that_are_given_are_used_by_one_process_alone(session: Callable[..., Child]) -> None:
    with session(NOTHING, "-n", "auto", "--dist", "each", FENCEPOST_TEST_KAFKA="127.0.0.1:1") as child:
        assert child.wait(60) == 0, child.text
        assert "workers" not in child.text and "1 passed" in child.text


@pytest.mark.parametrize(("whom", "workers"), [(os.killpg, 2), (os.kill, 1)], ids=["to everybody", "to the controller"])
def test_an_interrupt_leaves_no_process_and_no_file_behind(
    session: Callable[..., Child], tmp_path: Path, whom: Callable[[int, int], None], workers: int
) -> None:
    def running() -> list[list[str]]:
        return [path.read_text().split() for path in tmp_path.glob("running-*")]

    with session(ENDLESS, "-n", str(workers), "--dist", "each") as child:
        wait_for(lambda: len(running()) == workers or not child.alive, 60, "every worker to be at it")
        pids = [int(pid) for words in running() for pid in words[:3]]
        folders = [Path(words[3]) for words in running()]
        assert len(pids) == 3 * workers and all(guard.born(pid) for pid in pids), child.text
        assert all(folder.is_dir() for folder in folders)
        whom(child.pid, signal.SIGINT)
        assert child.wait(60) == pytest.ExitCode.INTERRUPTED, child.text
        wait_for(lambda: not any(guard.born(pid) for pid in pids), 40, "every process to end")
        assert not any(folder.exists() for folder in folders)
