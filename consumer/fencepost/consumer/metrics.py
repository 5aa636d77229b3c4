"""Prometheus metrics of a consumer, computed when they are asked for; labels are consumers and reasons, never tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from fencepost.consumer.outcomes import Outcome
from fencepost.consumer.readiness import Watch
from fencepost.consumer.standing import DEAD_LETTERS

__all__ = ["ConsumerMetrics", "exposition"]

PREFIX = "fencepost_consumer_"
LABELS = ("consumer",)


class ConsumerMetrics(Collector):
    """What the runner counted since it was made, and what the watch last saw."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Every metric once; waits for nothing."""
        standing, report = self._watch.standing, self._watch.report()
        yield self._counter("handled", "Deliveries whose handler ran and was committed.", Outcome.HANDLED)
        yield self._counter("duplicates", "Deliveries whose operation had been handled before.", Outcome.DUPLICATE)
        yield self._counter("conflicts", "Deliveries that came back with another meaning.", Outcome.CONFLICT)
        dead = CounterMetricFamily(
            f"{PREFIX}dead_letters", "Deliveries set aside, by typed reason.", labels=(*LABELS, "reason")
        )
        for reason in DEAD_LETTERS:
            dead.add_metric([standing.consumer, reason], standing.dead_letters(reason))
        yield dead
        failures = CounterMetricFamily(
            f"{PREFIX}failures", "Attempts that committed nothing and are made again.", labels=LABELS
        )
        failures.add_metric([standing.consumer], standing.failures)
        losses = CounterMetricFamily(
            f"{PREFIX}losses", "Connections and partitions lost without being given back.", labels=LABELS
        )
        losses.add_metric([standing.consumer], standing.losses)
        yield from (failures, losses)
        yield self._gauge("in_flight", "Deliveries in the hands of a handler.", report.in_flight)
        oldest = report.oldest_unhandled_seconds or 0.0
        yield self._gauge("oldest_unhandled_seconds", "Time here of the oldest delivery that is not done.", oldest)
        if report.assigned is not None:
            yield self._gauge("partitions_assigned", "Partitions of this process.", report.assigned)
        if report.lag is not None:
            yield self._gauge("lag", "Messages on assigned partitions that are not done.", report.lag)
        yield self._gauge("ready", "1 while /readyz says so.", float(report.ready))

    def _counter(self, name: str, text: str, outcome: Outcome) -> CounterMetricFamily:
        made = CounterMetricFamily(f"{PREFIX}{name}", text, labels=LABELS)
        made.add_metric([self._watch.standing.consumer], self._watch.standing.outcome(outcome))
        return made

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        made = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=LABELS)
        made.add_metric([self._watch.standing.consumer], value)
        return made


def exposition(watch: Watch) -> Callable[[], tuple[str, bytes]]:
    """Gives content type and text at every call; uses a registry of its own, so that nothing else is shown."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ConsumerMetrics(watch))
    return lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))
