"""Time the measurement of the demo from scratch with one and more workers: perplexity and tasks of four models.

::

    .venv/bin/python benchmarks/side_by_side.py                          # some minutes
    .venv/bin/python benchmarks/side_by_side.py --rounds 3 --runners local:1 local:2 dask:2

Every run is a release of the demo in a separate project and a separate process. The clock runs while the merge is
assessed, including the start of workers and of the processes that hold models. Runners take turns, so that other load
on the machine affects all of them. There is no CPU figure for a cluster's workers, which are not our child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--runners", nargs="+", default=["local:1", "local:2"])
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.one:
        kind, workers = given.one.split(":")
        print(json.dumps(measure(kind, int(workers))))
        return
    for number in range(given.rounds):
        for runner in given.runners:
            with tempfile.TemporaryDirectory() as place:
                environment = {**os.environ, "MERGEGATE_HOME": f"{place}/state", "HF_HUB_OFFLINE": "1"}
                environment["PYTHONPATH"] = str(PROJECT)
                command = [sys.executable, str(Path(__file__).resolve()), "--one", runner]
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=place)
                found = json.loads(run.stdout.splitlines()[-1])
            load = os.getloadavg()[0]
            print(f"round {number + 1}, {runner}: {found}, load {load:.1f}", flush=True)


def measure(kind: str, workers: int) -> dict[str, Any]:
    """Return the wall-clock and CPU seconds of the assessment."""
    from mergegate.flows.prefect_api import configure, local_api

    configure(Path(os.environ["MERGEGATE_HOME"]))
    with local_api():
        from mergegate.flows import release as module
        from mergegate.flows.profile import load_profile
        from mergegate.tasks.base.runners import RunnerSettings
        from mergegate.tasks.models.checkpoints import end_model_process

        seconds = {}
        assess = module.assess_merge

        def timed(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            found = assess(*given, **named)
            seconds["wall"] = round(time.monotonic() - began, 1)
            return found

        module.assess_merge = timed
        profile = load_profile(PROJECT / "profiles" / "demo.yaml")
        settings = RunnerSettings.model_validate({"kind": kind, "workers": workers})
        module.release(profile.model_copy(update={"runner": settings, "publish": None}))
        end_model_process()
    ours, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(one.ru_utime + one.ru_stime for one in (ours, theirs))
    return {**seconds, "cpu of the whole run": round(cpu, 1)}


if __name__ == "__main__":
    main()
