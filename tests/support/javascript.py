"""Node with the packages of `tests/interop/package-lock.json`, installed once per lock file into the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from stack.places import cache_folder
from stack.preparing import prepared
from stack.process import Unavailable

FOLDER = Path(__file__).parents[1] / "interop"
INSTALL_SECONDS = 120
RUN_SECONDS = 30


def modules() -> Path:
    """The folder of the packages; installs them when they are not in the cache. Raises Unavailable with the reason."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Unavailable("node and npm are not installed")
    lock = (FOLDER / "package-lock.json").read_bytes()
    return prepared(cache_folder() / f"node-{hashlib.sha256(lock).hexdigest()[:16]}", _install, INSTALL_SECONDS)


def _install(folder: Path) -> Path:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(FOLDER / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"npm ci did not end within {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        raise Unavailable(f"npm ci failed: {' '.join(done.stderr.split())[:300]}")
    return folder / "node_modules"


def ask(packages: Path, *requests: dict[str, Any]) -> list[Any]:
    """The answers of the SDK to these requests, in their order; fails with its error."""
    done = subprocess.run(
        ["node", str(FOLDER / "sdk.cjs")],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={**os.environ, "NODE_PATH": str(packages)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers
