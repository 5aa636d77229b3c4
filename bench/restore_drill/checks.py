"""What a drill has looked at: each check by its step and in words, and those that did not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

__all__ = ["Checks"]


class Checks:
    """Goes on after a check that did not hold: what follows from it is to be seen too."""

    def __init__(self) -> None:
        self.made: Counter[int] = Counter()
        self.wrong: list[str] = []

    def holds(self, step: int, what: str, truth: bool, found: object = "") -> None:
        """Notes whether it is so."""
        self.made[step] += 1
        if not truth:
            self.wrong.append(f"{step}: {what}{'' if found == '' else f': {found}'}")

    def refused(self, step: int, what: str, by: type[Exception], act: Callable[[], object]) -> None:
        """Notes whether the act raises exactly that."""
        try:
            done = act()
        except by:
            self.holds(step, what, True)
        except Exception as error:  # noqa: BLE001 (told)
            self.holds(step, what, False, f"another refusal: {error!r}")
        else:
            self.holds(step, what, False, f"it was allowed: {done!r}")

    def allowed(self, step: int, what: str, act: Callable[[], object]) -> None:
        """Notes whether the act goes through: the control of a refusal."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (told)
            self.holds(step, what, False, repr(error))
        else:
            self.holds(step, what, True)
