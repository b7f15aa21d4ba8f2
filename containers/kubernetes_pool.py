"""Print the job template of a Kubernetes pool for mergegate: Prefect's own, with GPUs, a volume, secrets and no root.

::

    python containers/kubernetes_pool.py > pool.json
    prefect work-pool create mergegate-kubernetes --type kubernetes --base-job-template pool.json
    prefect worker start --pool mergegate-kubernetes --type kubernetes      # in the cluster; needs prefect-kubernetes

The template comes from the installed version of Prefect, so it matches the worker. ``OURS`` lists the settings that
this script adds, with their defaults. Deployments can set them, as ``prefect.yaml`` does.
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
        "description": "Number of GPUs of a run, which the device plugin of the cluster assigns. Default: 0.",
        "type": "integer",
        "minimum": 0,
        "default": 0,
    },
    "project_claim": {
        "title": "Volume of the project",
        "description": "PersistentVolumeClaim for profiles, recipes and the store, mounted at /project. "
        "Several nodes need ReadWriteMany.",
        "type": "string",
        "default": "mergegate-project",
    },
    "secret": {
        "title": "Secret",
        "description": "Secret whose keys become environment variables: PREFECT_API_AUTH_STRING, HF_TOKEN.",
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
        raise SystemExit("Prefect is not installed for this Python. Use the Python of the project's environment.")
    known = Path(found.origin).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    own: dict[str, Any] = json.loads(known.read_text())["prefect-kubernetes"]["kubernetes"]
    return own["default_base_job_configuration"]  # type: ignore[no-any-return]  # of JSON


if __name__ == "__main__":
    json.dump(pool_template(), sys.stdout, indent=2)
