"""No offset passes unfinished work, no key overtakes itself, and what was taken away moves nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.lanes import AHEAD_MESSAGES, BUFFER_MESSAGES, Lanes, Work
from fencepost.consumer.runner import RunnerOptions


def delivery(offset: int, key: bytes, body: bytes = b"x") -> Delivery:
    return Delivery.from_kafka(cluster_id="c", topic="t", partition=0, offset=offset, headers=(), key=key, value=body)


def lanes_of(concurrency: int = 4, batch: int = 1) -> Lanes:
    lanes = Lanes(RunnerOptions(concurrency=concurrency, batch=batch))
    lanes.assign("t", 0, "")
    return lanes


def fill(lanes: Lanes, keys: list[bytes], partition: int = 0, first: int = 0) -> None:
    lane = lanes.of("t", partition)
    assert lane is not None
    for offset, key in enumerate(keys, first):
        lanes.add(lane, offset, delivery(offset, key))


@pytest.mark.parametrize("batch", [1, 2, 100])
@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=30), st.data())
def test_the_offset_is_a_contiguous_prefix_and_each_key_keeps_its_order(
    batch: int, keys: list[bytes], data: st.DataObject
) -> None:
    lanes = lanes_of(batch=batch)
    fill(lanes, keys)
    lane = lanes.of("t", 0)
    assert lane is not None
    running: list[Work] = []
    done: list[int] = []
    while len(done) < len(keys):
        while started := lanes.start():
            assert len(started) <= batch
            running += started
        assert len({work.key for work in running}) == len(running) == lanes.running
        work = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if data.draw(st.booleans()):
            lanes.again(work, 0.0)
            continue
        lanes.finished(work)
        done.append(work.offset)
        prefix = next(offset for offset in range(len(keys) + 1) if offset not in done)
        assert (lane.end or 0) == prefix
    for key in set(keys):
        offsets = [offset for offset in done if keys[offset] == key]
        assert offsets == sorted(offsets)
    assert lanes.to_commit([lane]) == [(lane, len(keys))]
    assert lanes.to_commit([lane]) == []
    assert (lane.keys, list(lane.works), lane.waiting, lane.bytes_waiting, lanes.running) == ({}, [], 0, 0, 0)


def test_a_partition_that_was_taken_away_starts_nothing_and_moves_no_offset() -> None:
    lanes = lanes_of()
    fill(lanes, [b"a", b"b", b"a"])
    lane = lanes.of("t", 0)
    (first,), (second,) = lanes.start(), lanes.start()
    assert lane is not None
    lanes.finished(first)
    assert lanes.to_commit([lane]) == [(lane, 1)]

    lanes.forget("t", 0)
    lanes.finished(second)

    assert (lanes.to_commit([lane]), lane.end, lanes.start(), lanes.running) == ([], 1, [], 0)


def test_partitions_take_turns_and_concurrency_bounds_them_all() -> None:
    lanes = lanes_of(concurrency=3)
    lanes.assign("t", 1, "")
    fill(lanes, [b"a", b"b", b"c", b"d"])
    fill(lanes, [b"e"], partition=1)
    started = [work for _ in range(4) for work in lanes.start()]
    assert [work.lane.partition for work in started] == [0, 1, 0]


def test_a_hand_holds_one_of_each_key_of_every_partition_and_is_free_when_all_of_it_is_done() -> None:
    lanes = lanes_of(concurrency=1, batch=4)
    lanes.assign("t", 1, "")
    fill(lanes, [b"a", b"a", b"b", b"c", b"d"])
    fill(lanes, [b"e"], partition=1)
    started = lanes.start()
    assert [(work.lane.partition, work.offset) for work in started] == [(0, 0), (1, 0), (0, 2), (0, 3)]
    for work in started[:3]:
        assert lanes.start() == []
        lanes.finished(work)
    lanes.again(started[3], 0.0)
    assert [work.offset for work in lanes.start()] == [4, 1, 3]
    lane = lanes.of("t", 0)
    assert lane is not None and lane.end == 1


@pytest.mark.parametrize("case", ["same key", "bytes", "far ahead"])
def test_a_full_lane_says_so_until_there_is_room(case: str) -> None:
    lanes = lanes_of()
    lane = lanes.of("t", 0)
    assert lane is not None and not lane.full and lane.roomy
    match case:
        case "same key":
            fill(lanes, [b"a"] * BUFFER_MESSAGES)
        case "bytes":
            lanes.add(lane, 0, delivery(0, b"a", b"x" * (1 << 20)))
        case _:
            fill(lanes, [b"slow"])
            (slow,) = lanes.start()
            for offset in range(1, AHEAD_MESSAGES):
                fill(lanes, [b"b"], first=offset)
                (quick,) = lanes.start()
                lanes.finished(quick)
            assert (lane.waiting, lane.full) == (1, True)
            lanes.again(slow, 0.0)
    assert lane.full and not lane.roomy
    while works := lanes.start():
        lanes.finished(*works)
    assert lane.roomy


def test_lag_counts_from_the_first_unfinished_message() -> None:
    lanes = lanes_of()
    lane = lanes.of("t", 0)
    assert lane is not None and lane.behind(7) == 0
    fill(lanes, [b"a", b"b"], first=10)
    assert lane.behind(15) == 5
    while works := lanes.start():
        lanes.finished(*works)
    assert lane.behind(15) == 3
    assert lanes.oldest() is None
