"""Cron expressions in real time zones: each instant once and in order, whatever the clocks do."""

import random
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from fencepost.jobs.cron import Cron
from fencepost.schemas.errors import InvalidInput

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
MINUTE = timedelta(minutes=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "zone", "after", "due"),
    [
        # Berlin skips 02:00 to 03:00: due at the first instant after the gap, and at its own time on the next day.
        ("30 2 * * *", BERLIN, "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        # Several times of one gap, and its end itself, are one instant.
        ("0,30 2,3 * * *", BERLIN, "2026-03-29T00:00", ["2026-03-29T01:00", "2026-03-29T01:30", "2026-03-30T00:00"]),
        # Berlin has 02:00 to 03:00 twice: due the first time only, also for who looks between the two.
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
        ("30 2 * * *", BERLIN, "2026-10-25T01:10", ["2026-10-26T01:30"]),
        # "Every half hour" goes by what passes: in both equal hours, and none in the one that is skipped.
        (
            *("*/30 * * * *", BERLIN, "2026-10-25T00:00"),
            ["2026-10-25T00:30", "2026-10-25T01:00", "2026-10-25T01:30", "2026-10-25T02:00"],
        ),
        ("*/30 * * * *", BERLIN, "2026-03-29T00:20", ["2026-03-29T00:30", "2026-03-29T01:00", "2026-03-29T01:30"]),
        ("0 * * * *", BERLIN, "2026-10-24T23:30", ["2026-10-25T00:00", "2026-10-25T01:00", "2026-10-25T02:00"]),
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00", ["2026-03-08T07:00", "2026-03-09T06:30"]),
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00", ["2026-11-01T05:30", "2026-11-02T06:30"]),
        # Clocks on Lord Howe Island change by half an hour.
        ("15 2 * * *", LORD_HOWE, "2026-10-03T00:00", ["2026-10-03T15:30", "2026-10-04T15:15"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T00:00", ["2026-04-04T14:45", "2026-04-05T15:15"]),
        ("*/30 3 * * *", LORD_HOWE, "2026-10-03T10:00", ["2026-10-03T16:00", "2026-10-03T16:30", "2026-10-04T16:00"]),
        (
            *("*/30 1 * * *", LORD_HOWE, "2026-04-04T10:00"),
            ["2026-04-04T14:00", "2026-04-04T14:30", "2026-04-04T15:00", "2026-04-05T14:30"],
        ),
        ("0 9 * * MON-FRI", "Asia/Tokyo", "2026-11-27T12:00", ["2026-11-30T00:00", "2026-12-01T00:00"]),
        ("* * 29 2 *", NEW_YORK, "2026-04-04T00:00", ["2028-02-29T05:00", "2028-02-29T05:01"]),
        ("0 0 1 1 *", "UTC", "2026-01-01T00:00", ["2027-01-01T00:00"]),
    ],
)
def test_instants_over_changes_of_the_clocks(expression: str, zone: str, after: str, due: list[str]) -> None:
    found = Cron(expression, zone).after(utc(after))
    assert list(islice(found, len(due))) == [utc(instant) for instant in due]


def fits(field: str, value: int) -> bool:
    """Whether a field of the small language of this test lets the value pass."""
    if field.startswith("*"):
        return value % int(field.partition("/")[2] or 1) == 0
    return str(value) in field.split(",")


def expected(minute: str, hour: str, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """By looking at every minute: the local time of each instant, or the instants of each local time."""

    def local(at: datetime) -> datetime:
        return at.astimezone(zone).replace(tzinfo=None)

    minutes = [start + MINUTE * n for n in range(1, (end - start) // MINUTE + 1)]
    if minute.startswith("*") or hour.startswith("*"):
        return [at for at in minutes if fits(minute, local(at).minute) and fits(hour, local(at).hour)]
    # One day more before: what was skipped there would be due now.
    shown = [(local(at), at) for at in [start - MINUTE * n for n in range(1440, -1, -1)] + minutes]
    found: set[datetime] = set()
    for day in {at.date() for at, _ in shown}:
        for n in range(1440):
            wanted = datetime.combine(day, datetime.min.time()) + MINUTE * n
            if fits(minute, wanted.minute) and fits(hour, wanted.hour):
                same = [at for seen, at in shown if seen == wanted]
                later = [at for (_, at), (was, _) in zip(shown[1:], shown, strict=False) if was < wanted <= local(at)]
                found |= set(same[:1] or later[:1])
    return sorted(at for at in found if start < at <= end)


def test_every_expression_agrees_with_a_look_at_every_minute() -> None:
    rng = random.Random(20261130)
    changes = (
        (BERLIN, date(2026, 3, 29)),
        (BERLIN, date(2026, 10, 25)),
        (NEW_YORK, date(2026, 3, 8)),
        (NEW_YORK, date(2026, 11, 1)),
        (LORD_HOWE, date(2026, 4, 5)),
        (LORD_HOWE, date(2026, 10, 4)),
        ("America/Sao_Paulo", date(2018, 11, 4)),  # at midnight
    )
    for zone, day in changes * 4:
        minute = rng.choice(["*", "*/5", "*/20", "0", "15", "0,30", "5,10,45", "59"])
        hour = rng.choice(["*", "*/2", "0", "1", "2", "3", "1,2", "2,3", "0,1,2,3,4"])
        middle = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).astimezone(UTC)
        start = middle - timedelta(hours=rng.randint(0, 4), minutes=rng.randint(0, 59))
        end = middle + timedelta(hours=12)
        found: list[datetime] = []
        for at in Cron(f"{minute} {hour} * * *", zone).after(start):
            if at > end:
                break
            found.append(at)
        assert found == expected(minute, hour, ZoneInfo(zone), start, end), (minute, hour, zone, day, start)


@pytest.mark.parametrize(
    ("expression", "zone", "field"),
    [
        ("0 3 * *", "UTC", "cron"),
        ("0 0 3 * * *", "UTC", "cron"),
        ("61 3 * * *", "UTC", "cron"),
        ("@daily", "UTC", "cron"),
        ("0 0 31 2 *", "UTC", "cron"),
        ("0 0 */20 * 1L", "UTC", "cron"),
        ("0 3 * * *", "Europe/Nowhere", "time_zone"),
        ("0 3 * * *", "Europe", "time_zone"),
        ("0 3 * * *", "../etc/passwd", "time_zone"),
        ("0 3 * * *", "", "time_zone"),
    ],
)
def test_what_cannot_be_read_or_never_comes_is_refused_by_field(expression: str, zone: str, field: str) -> None:
    assert str(Cron("0  3 * * *", BERLIN)) == "0 3 * * * Europe/Berlin"
    with pytest.raises(InvalidInput) as refused:
        Cron(expression, zone)
    assert refused.value.field == field
