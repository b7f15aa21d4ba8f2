"""Kill a run and its worker together, and time until the server notices, its slot is free and an alert is sent.

::

    python benchmarks/zombie.py            # two to three minutes

A temporary project has a server (SQLite), a deployment with a limit of one run, and a worker. When the run reports that
it is alive, the script sends SIGKILL to it and the worker. It then measures the time until the run is ``Crashed``,
until the limit lets another run begin, and until the webhook receives the message. The results are in
``dev/measurements/operation.md``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / part) for part in ("", "tests", "tests/flows")]

from demo_project import make_project  # noqa: E402  # from this checkout
from served_site import MERGEGATE, answers, asked, bare_environment, free_port, in_a_terminal_of_its_own, until, webhook  # noqa: E402  # from this checkout

NIGHTS = "profiles: [{profile: profiles/demo.yaml}]\nnotify: [{to: webhook, address: $HOOK, events: [failed]}]\n"


def main() -> None:
    """Kill, wait and print."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, webhook() as received:
        root, port = Path(place), free_port()
        make_project(root)
        (root / "schedules.yaml").write_text(NIGHTS)
        environment = bare_environment(root, HOOK=received.url)
        with in_a_terminal_of_its_own([*MERGEGATE, "server", "--port", str(port)], root, environment) as log:
            until(lambda: answers(port), "the server", log)
            with in_a_terminal_of_its_own([*MERGEGATE, "deploy"], root, environment) as said:
                until(lambda: "made" in said.read_text(), "the deployments", said)
            with asked(root, port) as client:
                first = client.read_deployment_by_name("release/demo")
                run = client.create_flow_run_from_deployment(first.id)
                with in_a_terminal_of_its_own([*MERGEGATE, "worker"], root, environment) as work:
                    until(lambda: "merge" in work.read_text(), "a run that works", work)
                    killed = kill_all_below(root)
                began = time.monotonic()
                print(f"killed {killed} processes of the worker and the run")
                until(lambda: name_of(client, run.id) == "Crashed", "the crash", log)
                print(f"crashed after {time.monotonic() - began:.0f} s")
                until(lambda: received.texts(), "the message", log)
                print(f"told after {time.monotonic() - began:.0f} s: {received.texts()[0]}")
                second = client.create_flow_run_from_deployment(first.id)
                with in_a_terminal_of_its_own([*MERGEGATE, "worker"], root, environment) as work:
                    until(lambda: name_of(client, second.id) == "Running", "the next run", work)
                    print(f"the next run works after {time.monotonic() - began:.0f} s")
                    kill_all_below(root)


def kill_all_below(root: Path) -> int:
    """Send SIGKILL to every process that works in the project, except its server and this process."""
    killed = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            here = (place / "cwd").resolve() == root.resolve()
        except OSError:
            continue
        if here and " server " not in command and int(place.name) != os.getpid():
            os.kill(int(place.name), signal.SIGKILL)
            killed += 1
    return killed


def name_of(client: object, run: object) -> str:
    """Return the name of a run's state."""
    state = client.read_flow_run(run).state  # type: ignore[attr-defined]  # a Prefect client
    return str(state.name if state else "")


if __name__ == "__main__":
    main()
