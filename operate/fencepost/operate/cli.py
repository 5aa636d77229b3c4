"""The entry of the command line: says what is missing in one line, and leaves everything else to the commands.

Exit codes: 0 done; 1 refused, or a check failed; 2 the command line or a setting is wrong; 3 a service does not
answer; 4 the outcome is not known; 128 + signal when a second signal ended a drain.
"""

from __future__ import annotations

import sys

NEEDED = {"typer", "rich", "pydantic_settings", "tenacity"}


def main() -> None:
    """Runs one command and exits with its code; without the extra `cli`, one line and exit code 2."""
    try:
        from fencepost.operate.commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.stderr.write(f"fencepost: the command line needs {missing}; pip install 'fencepost[cli]'\n")
        sys.exit(2)
    app(prog_name="fencepost")


if __name__ == "__main__":
    main()
