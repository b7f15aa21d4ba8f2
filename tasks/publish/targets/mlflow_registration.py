"""Register a release with MLflow: read the state, write one thing, and repeat until the registration is complete.

A run records scores, drops with their intervals, and the inputs of the merge. A version of the registered model points
to the location of the release and to the run. The alias is written last. Run and version are found again by the
release's digest, so a lost answer or a kill is just another state to start from. mergegate calls MLflow's REST API
directly: it needs eight requests, and MLflow's client would pin other versions of half of mergegate's dependencies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import urlencode

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.http import TRANSIENT_STATUSES, Answer, JsonClient, Unreachable
from mergegate.tasks.publish.content import PROVENANCE, ReleaseFile
from mergegate.tasks.store import digest, merkle

DIGEST_TAG, VERSION_TAG = "mergegate.digest", "mergegate.version"
TIMEOUT_S = 60.0
_API = "/api/2.0/mlflow"
_ROUNDS, _FAILURES, _MAX_WAIT_S = 60, 6, 16.0
_MAX_PARAM_LENGTH, _MAX_TAG_LENGTH = 6000, 5000  # characters; limits of MLflow
NextWrite = Literal["experiment", "run", "log", "finish", "model", "version", "alias", "done"]


class TryAgain(Exception):
    """The server gave no answer, or a transient error. The message says which."""


@dataclass(frozen=True)
class Registration:
    """The desired entries of a release in the registry."""

    model: str
    version: str
    alias: str
    source: str
    digest: str
    metrics: Mapping[str, float]
    facts: Mapping[str, str]

    @property
    def tags(self) -> list[dict[str, str]]:
        """Tags of the run and of the model version."""
        values = {DIGEST_TAG: self.digest, VERSION_TAG: self.version, **self.facts}
        return [{"key": key, "value": value[:_MAX_TAG_LENGTH]} for key, value in values.items()]


@dataclass(frozen=True)
class ObservedRegistry:
    """The present entries of a release in the registry. Empty values: no entry."""

    experiment: str
    run: str
    run_status: str
    logged: bool
    model: bool
    registered: str  # number of the version of this release
    champion: str  # number of the version that the alias points to


def registration_of(files: Sequence[ReleaseFile], model: str, version: str, alias: str, source: str) -> Registration:
    """Convert the provenance of a release to a registration."""
    provenance = next((file for file in files if file.name == PROVENANCE), None)
    statement = json.loads(provenance.read()) if provenance else {}
    predicate = _mapping(statement.get("predicate"))
    definition, verdict = _mapping(predicate.get("buildDefinition")), _mapping(predicate.get("mergegate_verdict"))
    metrics: dict[str, float] = {}
    for guard in verdict.get("guards") or ():
        name = f"{guard['task']}/{guard['reference']}"
        metrics[_metric(f"score/{guard['task']}")] = float(guard["merge_score"])
        for statistic in ("drop", "low", "high"):
            metrics[_metric(f"{statistic}/{name}")] = float(guard[statistic])
    drift = _mapping(verdict.get("drift"))
    metrics |= {
        f"perplexity/{statistic}": float(drift[statistic])
        for statistic in ("ratio", "low", "high")
        if _number(drift.get(statistic))
    }
    facts = {
        "mergegate.verdict": str(verdict.get("outcome", "")),
        "mergegate.recipe": digest(_mapping(definition.get("externalParameters")).get("recipe")),
        "mergegate.profile": str(_mapping(definition.get("externalParameters")).get("profile", "")),
    }
    for number, parent in enumerate(definition.get("resolvedDependencies") or ()):
        facts[f"mergegate.parent.{number}"] = f"{parent['name']} {parent['uri']}"
    content = merkle({file.name: (file.size, file.sha256) for file in files})
    return Registration(model, version, alias, source, content, metrics, {k: v for k, v in facts.items() if v})


def next_registry_write(observed: ObservedRegistry) -> NextWrite:
    """Return the next entry to write. The alias comes last, so it always points to a complete registration."""
    if not observed.registered:
        if not observed.experiment:
            return "experiment"
        if not observed.run:
            return "run"
        if not observed.logged:
            return "log"
        if observed.run_status != "FINISHED":
            return "finish"
        return "version" if observed.model else "model"
    return "done" if observed.champion == observed.registered else "alias"


@dataclass(frozen=True)
class MlflowRegistry:
    """The requests to MLflow's server that a release needs."""

    url: str
    token: str = ""

    def register(self, desired: Registration) -> tuple[str, bool]:
        """Write the missing entries until the registry matches ``desired``. Idempotent.

        Returns:
            Number of the registered version, and whether anything was written.

        Raises:
            Refused: The server rejects a request or does not answer.
        """
        changed, failures = False, 0
        for _ in range(_ROUNDS):
            try:
                observed = self._look(desired)
                write = next_registry_write(observed)
                if write == "done":
                    return observed.registered, changed
                changed = True
                self._write(write, desired, observed)
                failures = 0
            except TryAgain as error:
                failures += 1
                if failures >= _FAILURES:
                    raise self._silent(error) from None
                time.sleep(min(2.0 ** (failures - 1), _MAX_WAIT_S))
        raise self._silent(TryAgain("what was written is not there afterwards"))

    def source_of(self, model: str, version: str = "", alias: str = "") -> str:
        """Return the location of a registered version, or an empty string if there is no such version.

        Raises:
            Refused: The server rejects the request or does not answer.
        """
        if alias:
            answer = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        else:
            answer = self._patiently("model-versions/get", {"name": model, "version": version})
        return str(_mapping(answer.get("model_version")).get("source", ""))

    def version_at(self, model: str, alias: str) -> str:
        """Return the release version that an alias points to, or an empty string.

        Raises:
            Refused: The server rejects the request or does not answer.
        """
        answer = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        tags = _mapping(answer.get("model_version")).get("tags") or ()
        return next((str(tag["value"]) for tag in tags if tag["key"] == VERSION_TAG), "")

    def move_alias(self, model: str, version: str, alias: str) -> bool:
        """Point ``alias`` to the release ``version``; to its last registration if there are several. Idempotent.

        Returns:
            Whether the version is registered.

        Raises:
            Refused: The server rejects a request or does not answer.
        """
        condition = f"name = '{model}' and tags.`{VERSION_TAG}` = '{version}'"
        versions = self._patiently("model-versions/search", {"filter": condition}).get("model_versions") or []
        if not versions:
            return False
        number = str(max(int(item["version"]) for item in versions))
        current = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        if str(_mapping(current.get("model_version")).get("version", "")) != number:
            self._patiently("registered-models/alias", {"name": model, "alias": alias, "version": number}, post=True)
        return True

    def check(self) -> None:
        """Raise Refused if the server does not answer or denies access."""
        self._patiently("registered-models/search", {"max_results": "1"})

    @cached_property
    def _client(self) -> JsonClient:
        return JsonClient(self.url, TIMEOUT_S, self.token, connections=1)

    def _look(self, desired: Registration) -> ObservedRegistry:
        experiment = _mapping(
            self._get("experiments/get-by-name", {"experiment_name": desired.model}).get("experiment")
        )
        experiment_id = str(experiment.get("experiment_id", ""))
        runs: list[Any] = []
        if experiment_id:
            condition = f"tags.`{DIGEST_TAG}` = '{desired.digest}' and tags.`{VERSION_TAG}` = '{desired.version}'"
            runs = self._post("runs/search", {"experiment_ids": [experiment_id], "filter": condition}).get("runs") or []
        run = _mapping(runs[-1]) if runs else {}
        info, data = _mapping(run.get("info")), _mapping(run.get("data"))
        model = bool(self._get("registered-models/get", {"name": desired.model}))
        condition = f"name = '{desired.model}' and tags.`{DIGEST_TAG}` = '{desired.digest}'"
        versions = (
            self._get("model-versions/search", {"filter": condition}).get("model_versions") or [] if model else []
        )
        ours = [item for item in versions if item.get("source") == desired.source]
        alias = self._get("registered-models/alias", {"name": desired.model, "alias": desired.alias}) if model else {}
        return ObservedRegistry(
            experiment=experiment_id,
            run=str(info.get("run_id", "")),
            run_status=str(info.get("status", "")),
            logged=len(data.get("metrics") or ()) >= len(desired.metrics),
            model=model,
            registered=str(min((int(item["version"]) for item in ours), default="")),
            champion=str(_mapping(alias.get("model_version")).get("version", "")),
        )

    def _write(self, write: NextWrite, desired: Registration, observed: ObservedRegistry) -> None:
        now = round(time.time() * 1000)
        match write:
            case "experiment":
                self._post("experiments/create", {"name": desired.model})
            case "run":
                body = {"experiment_id": observed.experiment, "run_name": desired.version, "start_time": now}
                self._post("runs/create", {**body, "tags": desired.tags})
            case "log":
                metrics = [
                    {"key": key, "value": value, "timestamp": now, "step": 0} for key, value in desired.metrics.items()
                ]
                params = [{"key": key, "value": value[:_MAX_PARAM_LENGTH]} for key, value in desired.facts.items()]
                self._post("runs/log-batch", {"run_id": observed.run, "metrics": metrics, "params": params})
            case "finish":
                self._post("runs/update", {"run_id": observed.run, "status": "FINISHED", "end_time": now})
            case "model":
                self._post("registered-models/create", {"name": desired.model})
            case "version":
                body = {"name": desired.model, "source": desired.source, "run_id": observed.run}
                verdict = desired.facts.get("mergegate.verdict", "")
                self._post(
                    "model-versions/create",
                    {**body, "tags": desired.tags, "description": f"Release {desired.version} by mergegate: {verdict}"},
                )
            case "alias":
                body = {"name": desired.model, "alias": desired.alias, "version": observed.registered}
                self._post("registered-models/alias", body)

    def _get(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        return self._answered(f"{_API}/{path}?{urlencode(parameters)}", None)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._answered(f"{_API}/{path}", body)

    def _patiently(self, path: str, parameters: Mapping[str, str], *, post: bool = False) -> dict[str, Any]:
        for failures in range(_FAILURES):
            try:
                return self._post(path, parameters) if post else self._get(path, parameters)
            except TryAgain as error:
                last_error = error
                if failures < _FAILURES - 1:
                    time.sleep(min(2.0**failures, _MAX_WAIT_S))
        raise self._silent(last_error)

    def _answered(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request and return the answer, or an empty dict if the entry does not exist or exists already."""
        try:
            answer = self._client.request(path, body)
        except Unreachable as error:
            raise TryAgain(str(error)) from None
        if answer.ok:
            return dict(_mapping(answer.body))
        code = str(_mapping(answer.body).get("error_code", ""))
        if code in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS") or self._is_no_alias(path, answer):
            return {}
        if answer.status in TRANSIENT_STATUSES:
            raise TryAgain(answer.complaint)
        raise Refused(
            self.url,
            found=f"MLflow says no: {answer.complaint}",
            expected="a registry that takes a model version",
            remedy="export MLFLOW_TRACKING_TOKEN of somebody who may"
            if answer.status in (401, 403)
            else "see what it says",
        )

    @staticmethod
    def _is_no_alias(path: str, answer: Answer) -> bool:
        return "registered-models/alias?" in path and answer.status in (400, 404)

    def _silent(self, error: TryAgain) -> Refused:
        return Refused(
            self.url,
            found=f"MLflow does not answer as it should: {error}",
            expected="a server that answers",
            remedy="run again later: it resumes where it left off",
        )


def require_tracking(uri: str | None, location: str) -> str:
    """Return the address of the MLflow server.

    Raises:
        InvalidInput: The address is missing or not an HTTP URL.
    """
    if not uri or not uri.startswith(("http://", "https://")):
        raise InvalidInput(
            location,
            found=repr(uri) if uri else "no address",
            expected="http(s)://host of MLflow's server",
            remedy="set 'tracking_uri', or export MLFLOW_TRACKING_URI",
        )
    return uri.rstrip("/")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric(name: str) -> str:
    """Return a metric name that MLflow accepts: letters, digits and a few punctuation marks."""
    return "".join(character if character.isalnum() or character in "_-. /" else "_" for character in name)[:250]
