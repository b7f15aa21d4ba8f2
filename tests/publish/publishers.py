"""Publications in processes of their own, that can be killed: a warm process forks one for each.

The Hub's client reads its settings when it is imported and takes a second for it; the warm one has done that. Nothing
in there ever waits: the client's pauses between its own attempts are cut to none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import HANG_S

PROJECT = Path(__file__).resolve().parents[2]

_WARM = """
import json, os, sys, time, traceback
from pathlib import Path
import huggingface_hub.hf_api, huggingface_hub._commit_api, huggingface_hub.utils._xet, huggingface_hub.lfs, httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from merge_core.errors import MergegateError
from merge_core.store import HashMemo, sha256_file
from tasks.publish.content import ReleaseFile
from tasks.publish.targets.hub.publication import publish_hub
from tasks.checkpoints.hub import HubAccess

time.sleep = lambda seconds: None

def work(job):
    files = [
        ReleaseFile(name, Path(path).stat().st_size, sha256, Path(path)) for name, path, sha256 in job["files"]
    ]
    told, waits = [], []
    try:
        done = publish_hub(
            files, job["repo"], job["version"], HubAccess(job["endpoint"], job["token"]), HashMemo(Path(job["memo"])),
            wait=waits.append, on_progress=lambda done, total: told.append([done, total]), **job["options"],
        )
        return {"commit": done.commit, "new": done.new, **({"told": told} if job["watched"] else {})}
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
class Publishers:
    """The warm process."""

    process: subprocess.Popen[str]
    memo: Path

    def publish(
        self,
        endpoint: str,
        token: str,
        files: dict[str, Path],
        version: str,
        *,
        repo: str = "acme/demo",
        on_start: Callable[[int], None] = lambda pid: None,
        sha256: dict[str, str] | None = None,
        watched: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Publish ``files`` (name -> path). Returns what came of it: commit and new, refused, unexpected or killed.

        Args:
            on_start: Called with the process id before anything is sent.
            sha256: What was gated, where that is not what lies on disk.
            watched: Whether to say, too, what a person who watches was told.
        """
        from merge_core.store.hashing import sha256_file

        gated = sha256 or {}
        listed = [(name, str(path), gated.get(name) or sha256_file(path)) for name, path in files.items()]
        job = {
            "endpoint": endpoint,
            "token": token,
            "files": listed,
            "version": version,
            "repo": repo,
            "watched": watched,
        }
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({**job, "memo": str(self.memo), "options": options}) + "\n")
        self.process.stdin.flush()
        on_start(json.loads(self.process.stdout.readline())["pid"])
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "unexpected" not in answer, answer["unexpected"]
        return answer


@contextmanager
def publishers(place: Path, *, xet: bool) -> Iterator[Publishers]:
    """A warm process with an empty cache of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(place / "hf"), "HF_HUB_DISABLE_XET": "0" if xet else "1", "PYTHONPATH": str(PROJECT)}
    # hf_xet waits by itself, in Rust, before it asks again.
    settings |= {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "1ms"}
    place.mkdir(parents=True, exist_ok=True)
    with (place / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _WARM],
            env={**clean, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield Publishers(process, place / "memo.sqlite")
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=HANG_S)
