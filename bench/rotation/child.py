"""One worker process: publishes through the fence until SIGTERM, each callback at most so many seconds long.

`python child.py JSON`.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any, LiteralString

from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.publish import FencedTransaction
from fencepost.jobs.worker import Worker

PUBLISH: LiteralString = """
INSERT INTO published (operation, epoch, worker) VALUES (%(operation)s, %(epoch)s, %(worker)s)"""


def main() -> None:
    """Runs until it is told to stop."""
    # What a rotation takes away ends in a refusal of every attempt: that is what is measured, not worth a line each.
    logging.disable(logging.CRITICAL)
    options: dict[str, Any] = json.loads(sys.argv[1])
    worker = Worker(owner=options["worker"])

    def handler(ctx: Context, job: Job) -> None:
        def callback(tx: FencedTransaction) -> None:
            over = time.monotonic() + random.uniform(0, options["callback"])
            values = {"operation": job.operation, "epoch": job.fence.epoch, "worker": options["worker"]}
            tx.execute(PUBLISH, values)
            time.sleep(max(0.0, over - time.monotonic()))

        ctx.publish(callback)

    for name in options["classes"]:
        worker.job(name, lease=options["lease"], max_attempts=1000)(handler)
    worker.run(options["dsn"], concurrency=options["concurrency"], state=Path(options["state"]), drain=5.0)


main()
