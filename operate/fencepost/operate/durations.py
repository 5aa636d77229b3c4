"""Durations as people type them: a number and one of s, m, h, d."""

from __future__ import annotations

import re
from datetime import timedelta

from fencepost.schemas.errors import InvalidInput

__all__ = ["duration"]

_DURATION = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration(field: str, text: str | None) -> timedelta | None:
    """The duration that `text` names, None for None; InvalidInput naming the field."""
    if text is None:
        return None
    if (found := _DURATION.fullmatch(text)) is None:
        raise InvalidInput("not a duration", field=field, hint="a number and one of s, m, h, d; example: 7d")
    try:
        return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise InvalidInput("longer than time lasts", field=field, hint="at most 3650d") from None
