"""The wheel: the four parts import with nothing but psycopg and pydantic beside them, and the contract's files are in it."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = "import fencepost.relay, fencepost.consumer, fencepost.jobs, fencepost.schemas"
SURFACE = """
import fencepost.relay.outbox, fencepost.relay.sidecar, fencepost.consumer.inbox, fencepost.consumer.handoff
import fencepost.jobs.submit, fencepost.jobs.worker, fencepost.schemas.migrate
assert len(fencepost.schemas.migrate.tables()) >= 4 and len(fencepost.schemas.migrate.functions()) > 10
"""
INSTALLED = "from importlib.metadata import distributions; print(*sorted(d.name.lower() for d in distributions()))"
ALLOWED = {
    *("fencepost", "psycopg", "pydantic", "pydantic-core", "pydantic_core", "annotated-types", "annotated_types"),
    *(
        "typing-extensions",
        "typing_extensions",
        "typing-inspection",
        "typing_inspection",
        "tzdata",
        "pip",
        "setuptools",
    ),
}


def run(*command: str, cwd: Path) -> str:
    """Runs a command to its end; its output explains a failure."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(400)
def test_the_wheel_imports_with_only_the_core_dependencies(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), cwd=tmp_path)

    run(python, "-c", PARTS, cwd=tmp_path)

    assert set(run(python, "-c", INSTALLED, cwd=tmp_path).split()) <= ALLOWED
    run(python, "-c", SURFACE, cwd=tmp_path)
