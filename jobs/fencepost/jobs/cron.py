"""When a cron expression is due in a time zone: instants, each once and in their order, over every change of the clocks.

A fixed time of day that a change skips is due at the first instant after the gap; one that comes twice is due the first
time. An expression whose minute or hour begins with ``*`` means "every so often" and goes by what really passes: it is
due in both of two equal hours and never in an hour that is skipped. Debian's cron does the same.
Needs the extra ``periodic``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from fencepost.schemas.errors import InvalidInput

__all__ = ["Cron"]

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
# No change of the clocks is looked for further ahead at once; what lies behind is looked at when it comes near.
AHEAD = timedelta(days=400)
SOME_DAY = datetime(2026, 1, 1)


@dataclass(frozen=True, slots=True)
class Cron:
    """Minute, hour, day of the month, month and day of the week, in a zone of the IANA database such as Europe/Berlin.

    Raises InvalidInput naming ``cron`` or ``time_zone``; also for an expression that no day of fifty years fits.
    """

    expression: str
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        if len(self.expression.split()) != 5:
            raise InvalidInput(
                "cron has not five fields", field="cron", hint="minute hour day month weekday: 0 3 * * *"
            )
        try:
            if next(CronSim(self.expression, SOME_DAY), None) is None:
                raise InvalidInput("cron fits no day of fifty years", field="cron")
        except CronSimError as error:
            raise InvalidInput(
                f"cron cannot be read: {error}", field="cron", hint="for example 0 3 * * MON-FRI"
            ) from None
        try:
            ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            raise InvalidInput(
                "time_zone is not known here", field="time_zone", hint="for example Europe/Berlin; pip install tzdata"
            ) from None

    def __str__(self) -> str:
        return f"{' '.join(self.expression.split())} {self.time_zone}"

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Every instant (UTC) at which it is due after this one, in order; ends where nothing fits within fifty years."""
        zone = ZoneInfo(self.time_zone)
        start = instant.astimezone(UTC).replace(microsecond=0)
        minute, hour = self.expression.split()[:2]
        if minute.startswith("*") or hour.startswith("*"):
            return self._every(start, zone)
        return self._at(start, zone)

    def _at(self, last: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        for local in CronSim(self.expression, _local(last, zone)):
            # Two times within one gap are due together, once.
            if (found := _first(local, zone)) > last:
                yield found
                last = found

    def _every(self, start: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        # Between two changes of the clocks local time is the instant and an offset: each stretch is looked at by itself.
        while True:
            offset = _offset(start, zone)
            change = _change(start, start + AHEAD, zone) or start + AHEAD
            for local in CronSim(self.expression, _local(start, zone)):
                if (found := (local - offset).replace(tzinfo=UTC)) >= change:
                    break
                yield found
            else:
                return
            # The next stretch begins with the change itself.
            yield from self._fits(change, zone)
            start = change

    def _fits(self, instant: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        local = _local(instant, zone)
        if next(CronSim(self.expression, local - SECOND), None) == local:
            yield instant


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _local(instant: datetime, zone: ZoneInfo) -> datetime:
    return instant.astimezone(zone).replace(tzinfo=None)


def _first(local: datetime, zone: ZoneInfo) -> datetime:
    """The first instant at which clocks show this time, or the first after the gap that it lies in."""
    instant = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if _local(instant, zone) == local:
        return instant
    before = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return _change(before, instant, zone) or instant


def _change(low: datetime, until: datetime, zone: ZoneInfo) -> datetime | None:
    """The first instant in (low, until], whole seconds all, at which the zone's offset is another one than at ``low``."""
    offset = _offset(low, zone)
    while low < until:
        high = min(low + DAY, until)
        if _offset(high, zone) != offset:
            while high - low > SECOND:
                middle = (low + (high - low) / 2).replace(microsecond=0)
                low, high = (middle, high) if _offset(middle, zone) == offset else (low, middle)
            return high
        low = high
    return None
