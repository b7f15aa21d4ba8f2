"""Start Prefect's API for a project in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

_START = """
import asyncio, sys
from pathlib import Path
from mergegate.flows.prefect_api import configure, local_api
own_loop = asyncio.new_event_loop()
asyncio.set_event_loop(own_loop)
configure(Path(sys.argv[1]))
with local_api():
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        print("runs:", len(client.read_flow_runs()))
assert asyncio.get_event_loop_policy().get_event_loop() is own_loop
"""


def start_api(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start the API on a home, and print how many runs it has recorded. It must leave the event loop of its caller."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return subprocess.run(
        [sys.executable, "-c", _START, str(home)],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
