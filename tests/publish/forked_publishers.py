"""Publish in a separate process that a test can kill. A warm process with all imports forks each one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucket import AWS
from patience import HANG_S

from mergegate.merge_core.files import sha256_file

PROJECT = Path(__file__).resolve().parents[2]
_IMPORTS = """
import json, os, sys, tenacity, time, traceback
from pathlib import Path
time.sleep = lambda seconds: None
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.release.publish.content import ReleaseFile
from mergegate.tasks.release.publish.targets import PublishRequest, publish_targets
"""
# These scripts define ``publish(request, job, waits)``, which returns the outcome.
_ANY = """
if "s3" in sys.argv:
    from mergegate.tasks.release.publish.targets import s3_access as access
    access.READ_S = 0.4
    access._client(None, access.CONNECT_S, access.READ_S)
if "oci" in sys.argv:
    import httpx
    from mergegate.tasks.release.publish.targets import oci as registry
    registry.TIMEOUT_S = 0.4
    httpx.Client(verify=False, trust_env=False)

def publish(request, job, waits):
    done = publish_targets()[job["target"]["to"]].model_validate(job["target"]).publish(request)
    return {"version": done.version, "new": done.new}
"""
_HUB = """
import huggingface_hub.hf_api, huggingface_hub._commit_api, huggingface_hub.utils._xet, huggingface_hub.lfs, httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from mergegate.tasks.release.publish.targets.hub_publication import publish_hub
from mergegate.tasks.models.checkpoints.hub import HubAccess

def publish(request, job, waits):
    access = HubAccess(job["target"]["endpoint"], job["target"]["token"])
    done = publish_hub(request, "acme/demo", access, wait=waits.append, **job["target"]["options"])
    return {"commit": done.commit, "new": done.new}
"""
_FORKS = """
def work(job):
    files = [
        ReleaseFile(name, Path(path).stat().st_size, sha256, Path(path)) for name, path, sha256 in job["files"]
    ]
    told, waits = [], []
    request = PublishRequest(
        tuple(files), "demo", job["version"], Path(), HashMemo(Path(job["memo"])), job["expected_head"],
        lambda done, total: told.append([done, total]),
    )
    try:
        return {**publish(request, job, waits), **({"told": told} if job["watched"] else {})}
    except MergegateError as error:
        return {"refused": str(error), "exit": error.exit_code, "waited": sum(waits)}
    except BaseException:
        return {"unexpected": traceback.format_exc()}

for line in sys.stdin:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, json.dumps(work(json.loads(line))).encode())
        os._exit(0)
    os.close(writing)
    print(json.dumps({"pid": child}), flush=True)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    print(text.decode() or json.dumps({"killed": True}), flush=True)
"""


@dataclass(frozen=True)
class ForkedPublishers:
    """Publishers forked from a warm process. They share one cache of hashes."""

    process: subprocess.Popen[str]
    memo: Path

    def publish(
        self,
        target: Mapping[str, Any],
        files: Mapping[str, Path],
        version: str,
        *,
        expected_head: str | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
        sha256: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> dict[str, Any]:
        """Publish ``files`` (name -> path) and return the outcome: version and new, refused, or killed.

        ``target`` has the settings of a profile; for the Hub's client ``endpoint``, ``token`` and ``options``.
        ``on_start`` is called with the process ID before the process sends anything. ``sha256`` holds the hashes of
        gated files that differ on disk. The outcome of a ``watched`` publication has the reported progress.
        """
        known = sha256 or {}
        job = {
            "target": dict(target),
            "files": [(name, str(path), known.get(name) or sha256_file(path)) for name, path in files.items()],
            "version": version, "expected_head": expected_head, "memo": str(self.memo), "watched": watched,
        }  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        on_start(json.loads(self.process.stdout.readline())["pid"])
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "unexpected" not in answer, answer["unexpected"]
        return answer


@contextmanager
def _warm_process(place: Path, script: str, *arguments: str, environment: Mapping[str, str]) -> Iterator[Any]:
    place.mkdir(parents=True, exist_ok=True)
    with (place / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _IMPORTS + script + _FORKS, *arguments],
            env={**environment, "PYTHONPATH": str(PROJECT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True,
        )  # fmt: skip
        try:
            yield process, place / "memo.sqlite"
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=HANG_S)


@contextmanager
def forked_publishers(place: Path, *warm: str, **environment: str) -> Iterator[ForkedPublishers]:
    """Run a warm process that has imported the clients ``warm``."""
    settings = {**os.environ, **AWS, **environment, "MERGEGATE_HOME": str(place / "home")}
    with _warm_process(place, _ANY, *warm, environment=settings) as started:
        yield ForkedPublishers(*started)


@contextmanager
def hub_publishers(place: Path, *, xet: bool) -> Iterator[ForkedPublishers]:
    """Run a warm process that has imported the client of the Hub, with its own empty cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(place / "hf"), "HF_HUB_DISABLE_XET": "0" if xet else "1"}
    # hf_xet waits between retries in Rust, where a patched `time.sleep` has no effect.
    settings |= {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "1ms"}
    with _warm_process(place, _HUB, environment={**clean, **settings}) as started:
        yield ForkedPublishers(*started)
