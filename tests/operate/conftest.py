"""Commands run in this process, without settings of the machine and without traces in the logging of other tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import Fencepost, run_here


@pytest.fixture
def fencepost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fencepost]:
    """Runs a command: `fencepost(database, "doctor", FENCEPOST_RELAY_LEASE="3")`.

    Invariant: no command ever shows the password of its database, nor a traceback.
    """
    for name in [n for n in os.environ if n.startswith("FENCEPOST_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    root, ours = logging.getLogger(), logging.getLogger("fencepost")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield run_here
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
