"""Run an in-memory subset of MLflow's tracking and registry API on loopback, just large enough for a release."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loopback import Answer, FakeServer, Request, answering, json_answer


class SmallMlflow(FakeServer):
    """Minimal MLflow server. Tests may inspect and replace its contents."""

    STATE = ("experiments", "runs", "models", "aliases")

    def __init__(self) -> None:
        super().__init__({"GET /api/2.0/mlflow/.*": self.reply, "POST /api/2.0/mlflow/.*": self.reply})
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.models: dict[str, list[dict[str, Any]]] = {}
        self.aliases: dict[tuple[str, str], str] = {}

    def reply(self, request: Request) -> Answer:
        call = f"{request.method} {request.route.removeprefix('/api/2.0/mlflow/')}"
        content = self.call(call, request.query if request.method == "GET" else request.json)
        code = content.get("error_code", "")
        return json_answer(content, 404 if "NOT" in code else 400 if code else 200)

    def call(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        missing = {"error_code": "RESOURCE_DOES_NOT_EXIST"}
        match name:
            case "GET experiments/get-by-name":
                number = self.experiments.get(said["experiment_name"])
                return {"experiment": {"experiment_id": number}} if number else missing
            case "POST experiments/create":
                self.experiments[said["name"]] = str(len(self.experiments) + 1)
                return {"experiment_id": self.experiments[said["name"]]}
            case "POST runs/search":
                wanted = re.findall(r"'([^']*)'", said["filter"])
                found = [run for run in self.runs if wanted == [tag["value"] for tag in run["data"]["tags"][:2]]]
                return {"runs": found[::-1]}  # newest first
            case "POST runs/create":
                info = {"run_id": f"run-{len(self.runs)}", "status": "RUNNING"}
                self.runs.append({"info": info, "data": {"tags": said["tags"]}})
                return {"run": self.runs[-1]}
            case "POST runs/log-batch":
                self.run_of(said)["data"] |= {"metrics": said["metrics"], "params": said["params"]}
            case "POST runs/update":
                self.run_of(said)["info"]["status"] = said["status"]
            case "GET registered-models/get":
                return {"registered_model": {"name": said["name"]}} if said["name"] in self.models else missing
            case "POST registered-models/create":
                if said["name"] in self.models:
                    return {"error_code": "RESOURCE_ALREADY_EXISTS"}
                self.models[said["name"]] = []
            case "GET model-versions/search":
                model, value = re.findall(r"'([^']*)'", said["filter"])
                tag = {"key": re.findall(r"`([^`]*)`", said["filter"])[0], "value": value}
                return {"model_versions": [one for one in self.models.get(model, ()) if tag in one["tags"]]}
            case "POST model-versions/create":
                versions = self.models[said["name"]]
                versions.append({**said, "version": str(len(versions) + 1)})
            case "GET registered-models/alias":
                number = self.aliases.get((said["name"], said["alias"]), "")
                found = [one for one in self.models.get(said["name"], ()) if one["version"] == number]
                return {"model_version": found[0]} if found else {"error_code": "INVALID_PARAMETER_VALUE"}
            case "POST registered-models/alias":
                self.aliases[said["name"], said["alias"]] = said["version"]
            case _:
                return {"error_code": "ENDPOINT_NOT_FOUND"}
        return {}

    def run_of(self, said: dict[str, Any]) -> dict[str, Any]:
        return next(run for run in self.runs if run["info"]["run_id"] == said["run_id"])


@contextmanager
def small_mlflow() -> Iterator[SmallMlflow]:
    """Run the server for the duration of a block."""
    with answering(SmallMlflow()) as server:
        yield server
