"""`python -m stack up|down|status`: the services in the background, for work between test runs."""

import sys

from . import background
from .process import Unavailable

USAGE = "usage: python -m stack up|down|status"


def main(arguments: list[str]) -> int:
    """Runs one command; the exit code is 0 when the services are as asked."""
    match arguments:
        case ["up"]:
            _show(background.up())
        case ["down"]:
            print("stopped" if background.down() else "nothing was running")
        case ["status"]:
            running = background.addresses()
            _show(running)
            return 0 if running else 1
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


def _show(addresses: dict[str, str]) -> None:
    for name, address in addresses.items():
        print(f"{name:12} {address}")
    if not addresses:
        print("not running")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Unavailable as error:
        sys.exit(f"stack: {error}")
