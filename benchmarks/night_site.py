"""Run a project with a server and a worker on this machine's loopback, for realistic nightly runs and kills.

::

    with NightSite(root) as site:
        site.start_server(); site.deploy(); site.start_worker()
        run = site.trigger()                      # as `mergegate trigger` does
        site.kill("flow"); site.wait(run)         # Ended(state='Crashed', ...)
        site.release()                            # every file of what is published, hashed

The commands that a user types start everything in separate sessions. A marker in the environment identifies every
process, so none can be overlooked, even after its parent has exited.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

PROJECT = Path(__file__).resolve().parent.parent
PROFILE = "profiles/demo.yaml"
NIGHTS = "profiles: [{profile: profiles/demo.yaml}]\n"  # triggered, not scheduled
MARK = "MERGEGATE_NIGHT_SITE"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
PATIENCE_S = 900.0  # a longer wait means that something hangs
LOOK_EVERY_S = 0.05
_START = "from mergegate.flows.cli import main; main()"

Kind = Literal["flow", "models", "worker", "server"]
# Words that identify each kind in its command line.
_WORDS: Mapping[Kind, tuple[str, ...]] = {
    "flow": ("prefect.runner._workspace_supervisor", "prefect.engine"),  # the first becomes the second
    "models": ("answer_questions",),
    "worker": (" worker",),
    "server": ("main() server ",),
}


class Ended(NamedTuple):
    """How a run ended: its state, its message, and the seconds from start to end according to the server."""

    state: str
    message: str
    took: float


@dataclass
class NightSite:
    """A directory with the shipped profiles, its own state, and processes that end with the ``with`` block.

    Args:
        root: Directory that is empty or does not exist.
        more: Additional environment variables of all processes.
    """

    root: Path
    more: Mapping[str, str] = field(default_factory=dict)
    nights: str = NIGHTS

    def __enter__(self) -> Self:
        (self.root / "profiles").mkdir(parents=True)
        for profile in (PROJECT / "profiles").glob("*.yaml"):
            shutil.copy(profile, self.root / "profiles")
        (self.root / "profiles" / "demo").symlink_to(PROJECT / "profiles" / "demo")
        (self.root / "schedules.yaml").write_text(self.nights)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.ended():
            _kill(pid)

    def ended(self, within: float = 60.0) -> list[int]:
        """Stop worker and server as ^C does, and return the processes that are left after ``within`` seconds."""
        for kind in ("worker", "server"):
            for pid in self.running(kind):
                _send(pid, signal.SIGTERM)
            began = time.monotonic()
            while self.running(kind) and time.monotonic() < began + within:
                time.sleep(LOOK_EVERY_S)
        while (left := self.running()) and time.monotonic() < began + within:
            time.sleep(LOOK_EVERY_S)
        return left

    # Commands that a user types.

    def start_server(self) -> None:
        """Start ``mergegate server`` and return when it answers."""
        server, began = self._start("server", "--port", str(self.port)), time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/health", timeout=2):
                    return
            except OSError:
                if time.monotonic() - began > PATIENCE_S or server.poll() is not None:
                    raise RuntimeError(self.log()) from None
                time.sleep(LOOK_EVERY_S)

    def start_worker(self) -> None:
        """Start ``mergegate worker``."""
        self._start("worker")

    def deploy(self) -> None:
        """Run ``mergegate deploy``."""
        self.command("deploy")

    def trigger(self, profile: str = "demo") -> str:
        """Request a run as ``mergegate trigger`` does, for the next free worker, and return its id."""
        deployed = self.ask(f"deployments/name/release/{profile}")["id"]
        return str(self.ask(f"deployments/{deployed}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"])

    def command(self, *arguments: str, code: int = 0, before: str = "") -> str:
        """Run a command that must end with ``code``, and return its output.

        ``before`` is Python code that the command's process runs first.
        """
        done = subprocess.run(
            [sys.executable, "-c", before + _START, *arguments],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != code:
            raise RuntimeError(f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    # The state of the server.

    def state(self, run: str) -> Ended | None:
        """Return the final state of a run, or None while it is unfinished."""
        found = self.ask(f"flow_runs/{run}")
        state = found["state"] or {}
        if state.get("type") not in FINAL:
            return None
        return Ended(state["name"], state.get("message") or "", found["total_run_time"])

    def wait(self, run: str) -> Ended:
        """Wait for a run to end, and return how it ended."""
        began = time.monotonic()
        while (ended := self.state(run)) is None:
            if time.monotonic() - began > PATIENCE_S:
                raise RuntimeError(f"run {run} does not end\n{self.log()}")
            time.sleep(0.3)
        return ended

    def flow_runs(self) -> list[dict[str, Any]]:
        """Return all flow runs on the server, in any state."""
        return list(self.ask("flow_runs/filter", {}))

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        """Send a request to the server's API, and retry while the server is away."""
        secret = (self.root / ".mergegate" / "prefect" / "auth").read_text().strip()
        headers = {"Authorization": "Basic " + b64encode(secret.encode()).decode(), "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            token = self.ask("csrf-token?client=night-site")["token"]
            headers |= {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "night-site"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}", data=data, headers=headers, method=method
        )
        began = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    said = answer.read()
                    return json.loads(said) if said else None
            except urllib.error.HTTPError as error:
                if error.code < 500 or time.monotonic() - began > PATIENCE_S:
                    raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from error
            except OSError:
                if time.monotonic() - began > PATIENCE_S:
                    raise
            time.sleep(0.2)

    # Processes and files of the site.

    def running(self, kind: Kind | None = None) -> list[int]:
        """Return the live processes of this site, of one kind or all."""
        return [pid for pid, words in self._processes() if kind is None or any(one in words for one in _WORDS[kind])]

    def described(self) -> list[str]:
        """Return the command lines of all live processes."""
        return [f"{pid}: {words[:200]}" for pid, words in self._processes()]

    def kill(self, kind: Kind) -> int:
        """Send SIGKILL to all processes of a kind, wait until they are gone, and return how many there were."""
        found = self.running(kind)
        for pid in found:
            _kill(pid)
        return len(found)

    def released(self) -> dict[str, str]:
        """Return the published release: every file's sha256 by name, and the release's name as ``version``."""
        latest = self.root / "releases" / "demo" / "latest"
        if not latest.exists():
            return {}
        place = latest.resolve()
        files = {
            file.relative_to(place).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(place.rglob("*"))
            if file.is_file()
        }
        return {"version": place.name, **files}

    def forget(self) -> None:
        """Delete the store, releases and reports, as if nothing had run; the server's data stays."""
        home = self.root / ".mergegate"
        for place in (*(home / name for name in ("store", "runs", "reports", "anchors")), self.root / "releases"):
            shutil.rmtree(place, ignore_errors=True)

    def halves(self) -> list[str]:
        """Return unfinished work: artifacts, journals, releases, and values without their names."""
        home = self.root / ".mergegate"
        found = [*(home / "store").rglob("*.partial*"), *(home / "store").rglob("*.journal")]
        found += [one for one in (self.root / "releases").rglob("*") if "partial" in one.name]
        return sorted(str(one.relative_to(self.root)) for one in found)

    def size(self, *below: str) -> int:
        """Return the bytes of files below these directories of the state."""
        places = [self.root / ".mergegate" / name for name in below]
        return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())

    def log(self) -> str:
        """Return the last output of all processes."""
        file = self.root / "output"
        return file.read_text(errors="replace")[-6000:] if file.exists() else ""

    def environment(self) -> dict[str, str]:
        """Return our environment without any other Prefect settings, plus this site's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return {
            **kept,
            "MERGEGATE_HOME": str(self.root / ".mergegate"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",  # how often a worker looks for work; short, so that no run has to wait
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            "PYTHONPATH": str(PROJECT),
            MARK: str(self.root),
            **self.more,
        }

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-c", _START, *arguments],
                cwd=self.root,
                env=self.environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A script starts its background jobs this way.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )

    def _processes(self) -> Iterator[tuple[int, str]]:
        mark = f"{MARK}={self.root}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended, or belongs to another user
                continue
            if words:  # empty for a zombie that its parent has not reaped
                yield int(entry.name), words


def _kill(pid: int) -> None:
    try:
        gone = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    _send(pid, signal.SIGKILL)
    select.select([gone], [], [])
    os.close(gone)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
