"""The job template of a Kubernetes pool for our runs: Prefect's own, with a GPU, a volume, secrets, and no root.

::

    python containers/kubernetes_pool.py > pool.json
    prefect work-pool create mergegate-kubernetes --type kubernetes --base-job-template pool.json
    prefect worker start --pool mergegate-kubernetes --type kubernetes      # in the cluster; takes prefect-kubernetes

Made from the template of the Prefect that is installed, so that it fits the worker: only what is ours stands here. What
a deployment may set is listed with its default in ``OURS``; ``prefect.yaml`` sets some of it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

OURS: dict[str, dict[str, Any]] = {
    "gpus": {
        "title": "GPUs",
        "description": "How many GPUs a run gets; the device plugin of the cluster hands them out. 0: none.",
        "type": "integer",
        "minimum": 0,
        "default": 0,
    },
    "project_claim": {
        "title": "Volume of the project",
        "description": "A PersistentVolumeClaim, mounted at /project: profiles, recipes, and the store in .mergegate. "
        "ReadWriteMany where several nodes share it.",
        "type": "string",
        "default": "mergegate-project",
    },
    "secret": {
        "title": "Secret",
        "description": "A Secret whose keys become variables: PREFECT_API_AUTH_STRING, HF_TOKEN.",
        "type": "string",
        "default": "mergegate",
    },
}


def pool_template() -> dict[str, Any]:
    """Return the base job template of the pool, for ``--base-job-template``."""
    template = copy.deepcopy(_prefects_own())
    template["variables"]["properties"] |= copy.deepcopy(OURS)
    properties = template["variables"]["properties"]
    properties["image"]["default"] = "mergegate"
    properties["finished_job_ttl"]["default"] = 86_400
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    pod["volumes"] = [{"name": "project", "persistentVolumeClaim": {"claimName": "{{ project_claim }}"}}]
    (job,) = pod["containers"]
    job["volumeMounts"] = [{"name": "project", "mountPath": "/project"}]
    job["workingDir"] = "/project"
    job["envFrom"] = [{"secretRef": {"name": "{{ secret }}", "optional": True}}]
    job["securityContext"] = {"allowPrivilegeEscalation": False}
    job["resources"]["limits"]["nvidia.com/gpu"] = "{{ gpus }}"
    return template


def _prefects_own() -> dict[str, Any]:
    found = importlib.util.find_spec("prefect")
    if found is None or found.origin is None:
        raise SystemExit("Prefect is not installed for this Python: call the project's own")
    known = Path(found.origin).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    own: dict[str, Any] = json.loads(known.read_text())["prefect-kubernetes"]["kubernetes"]
    return own["default_base_job_configuration"]  # type: ignore[no-any-return]  # of JSON


if __name__ == "__main__":
    json.dump(pool_template(), sys.stdout, indent=2)
