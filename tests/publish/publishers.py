"""Publish to the Hub in a separate process that a test can kill. A warm process forks one for each publication.

The Hub client reads its settings on import, which takes a second, so the warm process imports it once. The forked
processes do not wait: the client's pauses between attempts are removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_process import WarmProcess, listed_files, warm_process

_WARM = """
import json, os, sys, time, traceback
from pathlib import Path
import huggingface_hub.hf_api, huggingface_hub._commit_api, huggingface_hub.utils._xet, huggingface_hub.lfs, httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets import PublishRequest
from mergegate.tasks.publish.targets.hub_publication import publish_hub
from mergegate.tasks.checkpoints.hub import HubAccess

time.sleep = lambda seconds: None

def work(job):
    files = [
        ReleaseFile(name, Path(path).stat().st_size, sha256, Path(path)) for name, path, sha256 in job["files"]
    ]
    told, waits = [], []
    try:
        options = job["options"]
        request = PublishRequest(
            tuple(files), "demo", job["version"], Path(), HashMemo(Path(job["memo"])),
            options.pop("expected_head", None), lambda done, total: told.append([done, total]),
        )
        access = HubAccess(job["endpoint"], job["token"])
        done = publish_hub(request, job["repo"], access, wait=waits.append, **options)
        return {"commit": done.commit, "new": done.new, **({"told": told} if job["watched"] else {})}
    except MergegateError as error:
        return {"refused": str(error), "exit": error.exit_code, "waited": sum(waits)}
    except BaseException:
        return {"unexpected": traceback.format_exc()}
"""


@dataclass(frozen=True)
class Publishers:
    """Publishers forked from a warm process."""

    warm: WarmProcess

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
        """Publish ``files`` (name -> path) and return the outcome: commit and new, refused, unexpected, or killed.

        ``on_start`` is called with the process ID before the process sends anything. ``sha256`` holds the hashes of
        gated files that differ on disk.
        """
        job = {
            "endpoint": endpoint,
            "token": token,
            "files": listed_files(files, sha256),
            "version": version,
            "repo": repo,
            "watched": watched,
            "options": options,
        }
        return self.warm.ask(job, on_start)


@contextmanager
def publishers(place: Path, *, xet: bool) -> Iterator[Publishers]:
    """Run a warm process with its own empty cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(place / "hf"), "HF_HUB_DISABLE_XET": "0" if xet else "1"}
    # hf_xet waits between retries in Rust, where a patched `time.sleep` has no effect.
    settings |= {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "1ms"}
    with warm_process(place, _WARM, environment={**clean, **settings}) as warm:
        yield Publishers(warm)
