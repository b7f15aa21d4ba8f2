"""Publications to any target in processes of their own, that can be killed: a warm process forks one for each.

Nothing in there ever waits: pauses between attempts are cut to none, and silence is believed after a moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_process import WarmProcess, listed_files, warm_process

AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "an-example-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}

_WARM = """
import json, os, sys, tenacity, time, traceback
from pathlib import Path
time.sleep = lambda seconds: None
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets import publish_targets
if "s3" in sys.argv:
    from mergegate.tasks.publish.targets.s3 import access
    access.READ_S = 0.4
    access._client(None, access.CONNECT_S, access.READ_S)
if "oci" in sys.argv:
    import httpx
    from mergegate.tasks.publish.targets.oci import registry
    registry.TIMEOUT_S = 0.4
    httpx.Client(verify=False, trust_env=False)

def work(job):
    files = [
        ReleaseFile(name, Path(path).stat().st_size, sha256, Path(path)) for name, path, sha256 in job["files"]
    ]
    target = publish_targets()[job["target"]["to"]].model_validate(job["target"])
    hashes = HashMemo(Path(job["memo"]))
    try:
        done = target.publish(
            files, "demo", job["version"], Path(), expected_head=job["expected_head"], hashes=hashes,
            on_progress=lambda done, total: None,
        )
        return {"version": done.version, "new": done.new}
    except MergegateError as error:
        return {"refused": str(error), "exit": error.exit_code}
    except BaseException:
        return {"unexpected": traceback.format_exc()}
"""


@dataclass(frozen=True)
class ForkedPublishers:
    """The warm process."""

    warm: WarmProcess

    def publish(
        self,
        target: Mapping[str, Any],
        files: Mapping[str, Path],
        version: str,
        *,
        expected_head: str | None = None,
        on_start: Callable[[int], None] = lambda pid: None,
        sha256: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Publish ``files`` (name -> path). Returns what came of it: version and new, refused or killed.

        Args:
            on_start: Called with the process id before anything is sent.
            sha256: What was gated, where that is not what lies on disk.
        """
        listed = listed_files(files, sha256)
        job = {"target": dict(target), "files": listed, "version": version, "expected_head": expected_head}
        return self.warm.ask(job, on_start)


@contextmanager
def forked_publishers(place: Path, *warm: str, **environment: str) -> Iterator[ForkedPublishers]:
    """A warm process.

    Args:
        warm: Which clients it imports beforehand.
    """
    settings = {**os.environ, **AWS, **environment, "MERGEGATE_HOME": str(place / "home")}
    with warm_process(place, _WARM, *warm, environment=settings) as process:
        yield ForkedPublishers(process)
