"""Prometheus metrics of a relay, computed when they are asked for; labels are destinations and reasons, never tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from fencepost.relay.loop import DestinationLoop
from fencepost.relay.publisher import ParkReason
from fencepost.relay.readiness import Watch

__all__ = ["RelayMetrics", "exposition"]

PREFIX = "fencepost_relay_"
BY_DESTINATION = ("destination",)


class RelayMetrics(Collector):
    """What the loops counted since they started, and what the watch last saw."""

    def __init__(self, loops: Sequence[DestinationLoop], watch: Watch) -> None:
        self._loops = list(loops)
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Every metric once; takes no lock and waits for nothing."""
        published = _counter("published", "Events that the broker confirmed and an ack recorded.")
        resent = _counter("resent", "Sends of events that had no definite answer before.")
        acks = _counter("acks", "Acks that recorded progress.")
        lost = _counter("lost_slots", "Times that another relay had taken over slots of this one.")
        overtaken = _counter("overtaken", "Events that a later one of their key overtook, or may have, on its way.")
        parked = CounterMetricFamily(
            f"{PREFIX}parked", "Events set aside, by typed reason.", labels=(*BY_DESTINATION, "reason")
        )
        held = _gauge("slots_held", "Slots that this relay holds now.")
        oldest = _gauge("oldest_unsent_seconds", "Age of the oldest unsent event, 0 when nothing waits.")
        in_flight = _gauge("in_flight", "Events handed to the broker whose answers are not recorded yet.")
        for loop in self._loops:
            name, counters = [loop.destination.name], loop.counters
            published.add_metric(name, counters.published)
            resent.add_metric(name, counters.resent)
            acks.add_metric(name, counters.acks)
            lost.add_metric(name, counters.lost_slots)
            overtaken.add_metric(name, counters.overtaken)
            for reason in ParkReason:
                parked.add_metric([*name, reason.value], counters.reasons[reason])
            held.add_metric(name, loop.slots_held)
            in_flight.add_metric(name, loop.in_flight)
            age = self._watch.oldest(loop.destination.name)
            if age is not None:
                oldest.add_metric(name, age)
        ready = GaugeMetricFamily(f"{PREFIX}ready", "1 while /readyz says so.", value=float(self._watch.report().ready))
        yield from (published, parked, resent, acks, lost, overtaken, held, oldest, in_flight, ready)


def exposition(metrics: RelayMetrics) -> Callable[[], tuple[str, bytes]]:
    """Gives content type and text at every call; uses a registry of its own, so that nothing else is shown."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}{name}", text, labels=BY_DESTINATION)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, labels=BY_DESTINATION)
