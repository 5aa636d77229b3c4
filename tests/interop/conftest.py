"""Both SDKs of CloudEvents, and the brokers they meet us on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from interop.sdks import JavaScript, Python, Sdk
from stack.process import Unavailable
from support import javascript
from support.services import missing


@pytest.fixture(scope="session")
def packages() -> Path:
    """The packages for node; without them the test is skipped loudly, and fails in CI."""
    try:
        return javascript.modules()
    except Unavailable as error:
        missing(str(error))


@pytest.fixture(params=["python", "javascript"])
def sdk(request: pytest.FixtureRequest) -> Sdk:
    """Each SDK in turn."""
    if request.param == "python":
        return Python()
    return JavaScript(request.getfixturevalue("packages"))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command run in this process sets up logging; its handlers must not outlive it."""
    root, ours = logging.getLogger(), logging.getLogger("fencepost")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
