"""The demo, once and to its end, on the embedded broker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "examples" / "reports" / "demo.py"


@pytest.mark.timeout(180)
def test_demo_runs_to_its_end_and_its_last_line_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_RELAY")}
    done = subprocess.run(
        [sys.executable, str(DEMO), "--broker", "embedded"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environment,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.rstrip().splitlines()[-1]
    assert "CHECK PASSED" in last
    assert "published exactly once" in last and "accepted at most once" in last
    assert done.stderr == ""
