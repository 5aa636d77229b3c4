"""Prometheus metrics of a worker, computed when they are asked for; labels are classes and kinds, never tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from fencepost.jobs.standing import Standing

__all__ = ["WorkerMetrics", "exposition"]

PREFIX = "fencepost_worker_"


class WorkerMetrics(Collector):
    """What the worker counted since it was made, and what it runs now."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def collect(self) -> Iterator[Metric]:
        """Every metric once; waits for nothing."""
        standing = self._standing
        claims, endings, unwritten = standing.counts()
        claimed = CounterMetricFamily(f"{PREFIX}claimed", "Jobs claimed.", labels=("class",))
        for name, count in claims.items():
            claimed.add_metric([name], count)
        ended = CounterMetricFamily(f"{PREFIX}ended", "Handlers that ended, by how.", labels=("class", "ending"))
        for (name, how), count in endings.items():
            ended.add_metric([name, how], count)
        lost = CounterMetricFamily(f"{PREFIX}outcomes_unwritten", "Outcomes given up; the leases of their claims end.")
        lost.add_metric([], unwritten)
        yield from (claimed, ended, lost)
        running = standing.running()
        oldest = max((execution.age() for execution in running), default=0.0)
        yield GaugeMetricFamily(f"{PREFIX}running", "Handlers that run.", value=len(running))
        yield GaugeMetricFamily(f"{PREFIX}capacity", "Handlers that may run at a time.", value=standing.capacity)
        yield GaugeMetricFamily(f"{PREFIX}oldest_running_seconds", "Age of the claim that runs longest.", value=oldest)
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 while /readyz says so.", value=float(standing.readiness()[0]))


def exposition(standing: Standing) -> Callable[[], tuple[str, bytes]]:
    """Gives content type and text at every call; uses a registry of its own, so that nothing else is shown."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(standing))
    return lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))
