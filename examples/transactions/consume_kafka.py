"""A consumer as many have it, with confluent-kafka; the inbox is the one call in the middle.

python consume_kafka.py with_sqlalchemy     (with_psycopg, with_sqlmodel, with_django)

An error ends the process before the offset is committed, and the message comes again. `KafkaRunner` does more: retries
with backoff, dead letters, partitions side by side, and a poll that no handler holds up.
"""

import importlib
import os
import sys
from typing import Any

from confluent_kafka import Consumer

from fencepost.consumer.delivery import Delivery

mine = importlib.import_module(sys.argv[1])

consumer = Consumer(
    {
        "bootstrap.servers": os.environ.get("KAFKA", "localhost:9092"),
        "group.id": os.environ.get("GROUP", "report-analysis"),
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
)
consumer.subscribe([os.environ.get("TOPIC", "reports")])
try:
    while True:
        message: Any = consumer.poll(1.0)
        if message is None or message.error():
            continue
        delivery = Delivery.from_kafka(
            cluster_id="main",
            topic=message.topic(),
            partition=message.partition(),
            offset=message.offset(),
            headers=message.headers(),
            key=message.key(),
            value=message.value(),
        )
        print(mine.on_accepted.handle(mine.database, delivery).outcome, flush=True)
        consumer.commit(message=message, asynchronous=False)
finally:
    consumer.close()
