"""`python examples/reports/demo.py [--broker embedded|kafka|rabbitmq] [--provider-port N]`: see director.py."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    # The services come from compose/; the workflow is the package `reports`, as its own processes import it.
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent / "compose")]
    sys.exit(importlib.import_module("reports.director").main())
