"""Publish to any target in a separate process that a test can kill. A warm process forks one for each publication.

These processes do not wait: pauses between attempts are removed, and timeouts are short.
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
from mergegate.tasks.publish.targets import PublishRequest, publish_targets
if "s3" in sys.argv:
    from mergegate.tasks.publish.targets import s3_access as access
    access.READ_S = 0.4
    access._client(None, access.CONNECT_S, access.READ_S)
if "oci" in sys.argv:
    import httpx
    from mergegate.tasks.publish.targets import oci_registry as registry
    registry.TIMEOUT_S = 0.4
    httpx.Client(verify=False, trust_env=False)

def work(job):
    files = [
        ReleaseFile(name, Path(path).stat().st_size, sha256, Path(path)) for name, path, sha256 in job["files"]
    ]
    target = publish_targets()[job["target"]["to"]].model_validate(job["target"])
    hashes = HashMemo(Path(job["memo"]))
    try:
        request = PublishRequest(
            tuple(files), "demo", job["version"], Path(), hashes, expected_head=job["expected_head"]
        )
        done = target.publish(request)
        return {"version": done.version, "new": done.new}
    except MergegateError as error:
        return {"refused": str(error), "exit": error.exit_code}
    except BaseException:
        return {"unexpected": traceback.format_exc()}
"""


@dataclass(frozen=True)
class ForkedPublishers:
    """Publishers forked from a warm process."""

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
        """Publish ``files`` (name -> path) and return the outcome: version and new, refused, or killed.

        ``on_start`` is called with the process ID before the process sends anything. ``sha256`` holds the hashes of
        gated files that differ on disk.
        """
        listed = listed_files(files, sha256)
        job = {"target": dict(target), "files": listed, "version": version, "expected_head": expected_head}
        return self.warm.ask(job, on_start)


@contextmanager
def forked_publishers(place: Path, *warm: str, **environment: str) -> Iterator[ForkedPublishers]:
    """Run a warm process that has imported the clients ``warm``."""
    settings = {**os.environ, **AWS, **environment, "MERGEGATE_HOME": str(place / "home")}
    with warm_process(place, _WARM, *warm, environment=settings) as process:
        yield ForkedPublishers(process)
