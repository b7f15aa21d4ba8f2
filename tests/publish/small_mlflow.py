"""Run an in-memory subset of MLflow's tracking and registry API on loopback, just large enough for a release.

``test_mlflow`` checks our requests against the real server. This one is fast enough for hundreds of runs with faults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from loopback import answering


class SmallMlflow(ThreadingHTTPServer):
    """Minimal MLflow server. Tests may inspect its contents."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.models: dict[str, list[dict[str, Any]]] = {}
        self.aliases: dict[tuple[str, str], str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, because tests break them."""


class _Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Nagle's algorithm would delay the second part of an answer by 40 ms
    server: SmallMlflow

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.reply(url.path, {name: values[0] for name, values in parse_qs(url.query).items()})

    def do_POST(self) -> None:
        self.reply(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, path: str, said: dict[str, Any]) -> None:
        name = f"{self.command} {path.removeprefix('/api/2.0/mlflow/')}"
        found = self.answer(name, said)
        status = 200 if "error_code" not in found else 404 if "NOT" in found["error_code"] else 400
        content = json.dumps(found).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        held, missing = self.server, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
        match name:
            case "GET experiments/get-by-name":
                number = held.experiments.get(said["experiment_name"])
                return {"experiment": {"experiment_id": number}} if number else missing
            case "POST experiments/create":
                held.experiments[said["name"]] = str(len(held.experiments) + 1)
                return {"experiment_id": held.experiments[said["name"]]}
            case "POST runs/search":
                wanted = re.findall(r"'([^']*)'", said["filter"])
                found = [run for run in held.runs if wanted == [tag["value"] for tag in run["data"]["tags"][:2]]]
                return {"runs": found[::-1]}  # newest first
            case "POST runs/create":
                info = {"run_id": f"run-{len(held.runs)}", "status": "RUNNING"}
                held.runs.append({"info": info, "data": {"tags": said["tags"]}})
                return {"run": held.runs[-1]}
            case "POST runs/log-batch":
                self.run_of(said)["data"] |= {"metrics": said["metrics"], "params": said["params"]}
            case "POST runs/update":
                self.run_of(said)["info"]["status"] = said["status"]
            case "GET registered-models/get":
                return {"registered_model": {"name": said["name"]}} if said["name"] in held.models else missing
            case "POST registered-models/create":
                if said["name"] in held.models:
                    return {"error_code": "RESOURCE_ALREADY_EXISTS"}
                held.models[said["name"]] = []
            case "GET model-versions/search":
                model, value = re.findall(r"'([^']*)'", said["filter"])
                tag = {"key": re.findall(r"`([^`]*)`", said["filter"])[0], "value": value}
                return {"model_versions": [one for one in held.models.get(model, ()) if tag in one["tags"]]}
            case "POST model-versions/create":
                versions = held.models[said["name"]]
                versions.append({**said, "version": str(len(versions) + 1)})
            case "GET registered-models/alias":
                number = held.aliases.get((said["name"], said["alias"]), "")
                found = [one for one in held.models.get(said["name"], ()) if one["version"] == number]
                return {"model_version": found[0]} if found else {"error_code": "INVALID_PARAMETER_VALUE"}
            case "POST registered-models/alias":
                held.aliases[said["name"], said["alias"]] = said["version"]
            case _:
                return {"error_code": "ENDPOINT_NOT_FOUND"}
        return {}

    def run_of(self, said: dict[str, Any]) -> dict[str, Any]:
        return next(run for run in self.server.runs if run["info"]["run_id"] == said["run_id"])

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def small_mlflow() -> Iterator[SmallMlflow]:
    """Run the server for the duration of a block."""
    with answering(SmallMlflow()) as server:
        yield server
