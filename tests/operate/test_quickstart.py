"""The quickstart as its first lines tell it, on a real database and a real Kafka."""

import json
from pathlib import Path

from support.command_line import CLI, environment
from support.database import Database
from support.processes import Child, wait_for
from support.services import Kafka

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def test_the_quickstart_accepts_relays_handles_and_publishes(
    database18: Database, kafka: Kafka, tmp_path: Path
) -> None:
    topic = kafka.topic()
    app = (QUICKSTART / "app.py").read_text()
    assert app.count('topics=["reports"]') == 1
    (tmp_path / "app.py").write_text(app.replace('topics=["reports"]', f'topics=["{topic}"]'))
    with database18.connect(autocommit=True) as conn:
        conn.execute((QUICKSTART / "schema.sql").read_bytes())
        routes = [{"match": "report.*", "to": topic}]
        destination = {"name": "reports", "kind": "kafka", "address": kafka.bootstrap, "routes": routes}
        env = environment(
            database18,
            {
                "FENCEPOST_DESTINATIONS": json.dumps([destination]),
                "KAFKA": kafka.bootstrap,
                "PYTHONPATH": str(tmp_path),
            },
        )
        with (
            Child([str(tmp_path / "app.py"), "report-1"], output=tmp_path / "accept", env=env) as accepting,
            Child([*CLI, "relay", "run"], output=tmp_path / "relay", env=env),
            Child([*CLI, "consumer", "run", "app:consumer"], output=tmp_path / "consumer", env=env),
            Child([*CLI, "worker", "run", "app:worker"], output=tmp_path / "worker", env=env),
        ):
            assert accepting.wait(60) == 0, accepting.text
            row = wait_for(
                lambda: conn.execute("SELECT body FROM reports").fetchone(), 60, "the report to be published"
            )
    assert row == ("summary of report-1",)
