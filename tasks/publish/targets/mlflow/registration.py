"""What MLflow is told of a release, and the talking: look, write one thing, look again, until all of it is there.

A run holds scores, drops with their intervals, and what it was made from; a version of the registered model points to
where the release stands, and to the run; the alias comes last. Both are found again by the release's digest, so a lost
answer or a kill is just another state to start from. MLflow's REST interface is asked directly: eight requests, and its
client would bring other versions of half of what is used here.
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
_ROUNDS, _FAILURES, _LONGEST_WAIT_S = 60, 6, 16.0
_MOST_PARAM, _MOST_TAG = 6000, 5000  # characters, as MLflow takes them
NextWrite = Literal["experiment", "run", "log", "finish", "model", "version", "alias", "done"]


class TryAgain(Exception):
    """No answer, or one that may pass; the message says which."""


@dataclass(frozen=True)
class Registration:
    """What is to stand in the registry."""

    model: str
    version: str
    alias: str
    source: str
    digest: str
    metrics: Mapping[str, float]
    facts: Mapping[str, str]

    @property
    def tags(self) -> list[dict[str, str]]:
        """Of the run and of the model version."""
        said = {DIGEST_TAG: self.digest, VERSION_TAG: self.version, **self.facts}
        return [{"key": key, "value": value[:_MOST_TAG]} for key, value in said.items()]


@dataclass(frozen=True)
class ObservedRegistry:
    """What stands there now; empty: nothing."""

    experiment: str
    run: str
    run_status: str
    logged: bool
    model: bool
    registered: str  # the number of our version
    champion: str  # the number that the alias means


def registration_of(files: Sequence[ReleaseFile], model: str, version: str, alias: str, source: str) -> Registration:
    """What a release says of itself: its provenance, in MLflow's words."""
    provenance = next((file for file in files if file.name == PROVENANCE), None)
    statement = json.loads(provenance.read()) if provenance else {}
    predicate = _mapping(statement.get("predicate"))
    definition, verdict = _mapping(predicate.get("buildDefinition")), _mapping(predicate.get("mergegate_verdict"))
    metrics: dict[str, float] = {}
    for guard in verdict.get("guards") or ():
        name = f"{guard['task']}/{guard['reference']}"
        metrics[_metric(f"score/{guard['task']}")] = float(guard["merge_score"])
        for what in ("drop", "low", "high"):
            metrics[_metric(f"{what}/{name}")] = float(guard[what])
    drift = _mapping(verdict.get("drift"))
    metrics |= {
        f"perplexity/{what}": float(drift[what]) for what in ("ratio", "low", "high") if _number(drift.get(what))
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
    """The one thing to write now. The alias is last: what it means is whole."""
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
    """MLflow's server, as far as a release needs it."""

    url: str
    token: str = ""

    def register(self, wanted: Registration) -> tuple[str, bool]:
        """Bring the registry to ``wanted``. Idempotent.

        Returns:
            The number of the version, and whether anything was written.

        Raises:
            Refused: when the server says no, or does not answer.
        """
        changed, failures = False, 0
        for _ in range(_ROUNDS):
            try:
                observed = self._look(wanted)
                write = next_registry_write(observed)
                if write == "done":
                    return observed.registered, changed
                changed = True
                self._write(write, wanted, observed)
                failures = 0
            except TryAgain as error:
                failures += 1
                if failures >= _FAILURES:
                    raise self._silent(error) from None
                time.sleep(min(2.0 ** (failures - 1), _LONGEST_WAIT_S))
        raise self._silent(TryAgain("what was written is not there afterwards"))

    def source_of(self, model: str, version: str = "", alias: str = "") -> str:
        """Where a version of a model stands; empty: there is none.

        Raises:
            Refused: when the server says no, or does not answer.
        """
        if alias:
            found = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        else:
            found = self._patiently("model-versions/get", {"name": model, "version": version})
        return str(_mapping(found.get("model_version")).get("source", ""))

    def version_at(self, model: str, alias: str) -> str:
        """The release that an alias means, by its own name; empty: none.

        Raises:
            Refused: when the server says no, or does not answer.
        """
        found = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        tags = _mapping(found.get("model_version")).get("tags") or ()
        return next((str(tag["value"]) for tag in tags if tag["key"] == VERSION_TAG), "")

    def move_alias(self, model: str, version: str, alias: str) -> bool:
        """Have ``alias`` mean the release ``version``; of several registrations of it, the last. Idempotent.

        Returns:
            Whether there is such a version.

        Raises:
            Refused: when the server says no, or does not answer.
        """
        condition = f"name = '{model}' and tags.`{VERSION_TAG}` = '{version}'"
        found = self._patiently("model-versions/search", {"filter": condition}).get("model_versions") or []
        if not found:
            return False
        number = str(max(int(one["version"]) for one in found))
        there = self._patiently("registered-models/alias", {"name": model, "alias": alias})
        if str(_mapping(there.get("model_version")).get("version", "")) != number:
            self._patiently("registered-models/alias", {"name": model, "alias": alias, "version": number}, post=True)
        return True

    def check(self) -> None:
        """See that the server answers, and lets us in.

        Raises:
            Refused: when it does not.
        """
        self._patiently("registered-models/search", {"max_results": "1"})

    @cached_property
    def _client(self) -> JsonClient:
        return JsonClient(self.url, TIMEOUT_S, self.token, connections=1)

    def _look(self, wanted: Registration) -> ObservedRegistry:
        experiment = _mapping(self._get("experiments/get-by-name", {"experiment_name": wanted.model}).get("experiment"))
        place = str(experiment.get("experiment_id", ""))
        runs: list[Any] = []
        if place:
            condition = f"tags.`{DIGEST_TAG}` = '{wanted.digest}' and tags.`{VERSION_TAG}` = '{wanted.version}'"
            runs = self._post("runs/search", {"experiment_ids": [place], "filter": condition}).get("runs") or []
        run = _mapping(runs[-1]) if runs else {}
        info, data = _mapping(run.get("info")), _mapping(run.get("data"))
        model = bool(self._get("registered-models/get", {"name": wanted.model}))
        condition = f"name = '{wanted.model}' and tags.`{DIGEST_TAG}` = '{wanted.digest}'"
        versions = (
            self._get("model-versions/search", {"filter": condition}).get("model_versions") or [] if model else []
        )
        ours = [one for one in versions if one.get("source") == wanted.source]
        known = self._get("registered-models/alias", {"name": wanted.model, "alias": wanted.alias}) if model else {}
        return ObservedRegistry(
            experiment=place,
            run=str(info.get("run_id", "")),
            run_status=str(info.get("status", "")),
            logged=len(data.get("metrics") or ()) >= len(wanted.metrics),
            model=model,
            registered=str(min((int(one["version"]) for one in ours), default="")),
            champion=str(_mapping(known.get("model_version")).get("version", "")),
        )

    def _write(self, write: NextWrite, wanted: Registration, there: ObservedRegistry) -> None:
        now = round(time.time() * 1000)
        match write:
            case "experiment":
                self._post("experiments/create", {"name": wanted.model})
            case "run":
                body = {"experiment_id": there.experiment, "run_name": wanted.version, "start_time": now}
                self._post("runs/create", {**body, "tags": wanted.tags})
            case "log":
                metrics = [
                    {"key": key, "value": value, "timestamp": now, "step": 0} for key, value in wanted.metrics.items()
                ]
                params = [{"key": key, "value": value[:_MOST_PARAM]} for key, value in wanted.facts.items()]
                self._post("runs/log-batch", {"run_id": there.run, "metrics": metrics, "params": params})
            case "finish":
                self._post("runs/update", {"run_id": there.run, "status": "FINISHED", "end_time": now})
            case "model":
                self._post("registered-models/create", {"name": wanted.model})
            case "version":
                body = {"name": wanted.model, "source": wanted.source, "run_id": there.run}
                said = wanted.facts.get("mergegate.verdict", "")
                self._post(
                    "model-versions/create",
                    {**body, "tags": wanted.tags, "description": f"Release {wanted.version} by mergegate: {said}"},
                )
            case "alias":
                body = {"name": wanted.model, "alias": wanted.alias, "version": there.registered}
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
                said = error
                if failures < _FAILURES - 1:
                    time.sleep(min(2.0**failures, _LONGEST_WAIT_S))
        raise self._silent(said)

    def _answered(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the server says; nothing, where it does not know what was asked for or has it already."""
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


def require_tracking(uri: str | None, where: str) -> str:
    """The address of the server.

    Raises:
        InvalidInput: when there is none.
    """
    if not uri or not uri.startswith(("http://", "https://")):
        raise InvalidInput(
            where,
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
    """A name that MLflow takes: letters, digits, and a few signs."""
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in name)[:250]
