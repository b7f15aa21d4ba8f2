"""Register a release with MLflow: read the state, write one entry, and repeat until the registration is complete.

An MLflow run records scores, drops with their intervals, and the inputs of the merge. A version of the registered model
points to the location of the release and to this run. The alias is written last. mergegate finds existing entries by
the digest of the release, so it can continue after a lost answer or a kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.content import PROVENANCE, ReleaseFile, content_digest, file_identities, read_document
from mergegate.tasks.store import digest
from mergegate.tasks.telemetry import (
    MlflowClient,
    MlflowError,
    member,
    metric_entries,
    mlflow_key,
    param_entries,
    tag_entries,
)

_DIGEST_TAG, _VERSION_TAG = "mergegate.digest", "mergegate.version"
_TIMEOUT_S = 60.0
_ROUNDS, _FAILURES, _MAX_WAIT_S = 60, 6, 16.0
NextWrite = Literal["experiment", "run", "log", "finish", "model", "version", "alias", "done"]


@dataclass(frozen=True)
class Registration:
    """Entries that a release should have in MLflow."""

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
        return tag_entries({_DIGEST_TAG: self.digest, _VERSION_TAG: self.version, **self.facts})


@dataclass(frozen=True)
class ObservedRegistry:
    """Entries that a release has in MLflow. An empty value means that the entry does not exist."""

    experiment: str
    run: str
    run_status: str
    has_metrics: bool
    has_model: bool
    registered_version: str  # number of the version of this release
    alias_version: str  # number of the version that the alias points to


def describe_release(files: Sequence[ReleaseFile], model: str, version: str, alias: str, source: str) -> Registration:
    """Build the registration of a release from its provenance. ``source`` is the location of the release."""
    provenance = next((file for file in files if file.name == PROVENANCE), None)
    predicate = member(read_document(provenance.read(), PROVENANCE) if provenance else {}, "predicate")
    metrics: dict[str, float] = {}
    for guard in member(predicate, "mergegate_verdict", "guards") or ():
        name = f"{guard['task']}/{guard['reference']}"
        metrics[mlflow_key(f"score/{guard['task']}")] = float(guard["merge_score"])
        for statistic in ("drop", "low", "high"):
            metrics[mlflow_key(f"{statistic}/{name}")] = float(guard[statistic])
    for statistic in ("ratio", "low", "high"):
        value = member(predicate, "mergegate_verdict", "drift", statistic)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            metrics[f"perplexity/{statistic}"] = float(value)
    parameters = member(predicate, "buildDefinition", "externalParameters")
    facts = {
        "mergegate.verdict": str(member(predicate, "mergegate_verdict", "outcome")),
        "mergegate.recipe": digest(member(parameters, "recipe") or None),
        "mergegate.profile": str(member(parameters, "profile")),
    }
    for number, parent in enumerate(member(predicate, "buildDefinition", "resolvedDependencies") or ()):
        facts[f"mergegate.parent.{number}"] = f"{parent['name']} {parent['uri']}"
    facts = {name: value for name, value in facts.items() if value}
    return Registration(model, version, alias, source, content_digest(file_identities(files)), metrics, facts)


def next_registry_write(observed_state: ObservedRegistry) -> NextWrite:
    """Return the next entry to write. The alias comes last, so it always points to a complete registration."""
    if not observed_state.registered_version:
        if not observed_state.experiment:
            return "experiment"
        if not observed_state.run:
            return "run"
        if not observed_state.has_metrics:
            return "log"
        if observed_state.run_status != "FINISHED":
            return "finish"
        return "version" if observed_state.has_model else "model"
    return "done" if observed_state.alias_version == observed_state.registered_version else "alias"


@dataclass(frozen=True)
class MlflowRegistry:
    """Client of MLflow's server. It retries requests after transient errors.

    Every method raises Refused if the server rejects a request or does not answer.
    """

    url: str
    token: str = ""

    def register(self, registration: Registration) -> tuple[str, bool]:
        """Write the missing entries until the registry matches ``registration``. Idempotent.

        Return the number of the registered version, and whether anything was written.
        """
        has_changed, failures = False, 0
        for _ in range(_ROUNDS):
            try:
                observed = self._observe(registration)
                write = next_registry_write(observed)
                if write == "done":
                    return observed.registered_version, has_changed
                has_changed = True
                self._write(write, registration, observed)
                failures = 0
            except MlflowError as error:
                failures += 1
                if failures >= _FAILURES or not error.is_transient:
                    raise self._refusal(error) from None
                time.sleep(min(2.0 ** (failures - 1), _MAX_WAIT_S))
        raise self._refusal(MlflowError("the written entries are missing afterwards"))

    def source(self, model: str, *, alias: str = "", number: str = "") -> str:
        """Return the location of the release that ``alias`` or ``number`` of ``model`` names, or an empty string."""
        if alias:
            return str(member(self._retry(lambda: self._alias(model, alias)), "source"))
        answer = self._retry(lambda: self._client.get("model-versions/get", name=model, version=number))
        return str(member(answer, "model_version", "source"))

    def alias_version(self, model: str, alias: str) -> str:
        """Return the release version that an alias points to, or an empty string without one."""
        tags = member(self._retry(lambda: self._alias(model, alias)), "tags") or ()
        return next((str(tag["value"]) for tag in tags if tag["key"] == _VERSION_TAG), "")

    def move_alias(self, model: str, version: str, alias: str) -> bool:
        """Point ``alias`` to the last registration of the release ``version``. Idempotent.

        Return false if the version is not registered.
        """
        versions = self._retry(lambda: self._versions(model, _VERSION_TAG, version))
        if not versions:
            return False
        number = str(max(int(item["version"]) for item in versions))
        if str(member(self._retry(lambda: self._alias(model, alias)), "version")) != number:
            body = {"name": model, "alias": alias, "version": number}
            self._retry(lambda: self._client.post("registered-models/alias", body))
        return True

    def check(self) -> None:
        """Check that the server answers and grants access."""
        self._retry(lambda: self._client.get("registered-models/search", max_results="1"))

    @cached_property
    def _client(self) -> MlflowClient:
        return MlflowClient(self.url, _TIMEOUT_S, self.token)

    def _observe(self, registration: Registration) -> ObservedRegistry:
        experiment = self._client.experiment_id(registration.model)
        runs: list[Any] = []
        if experiment:
            condition = (
                f"tags.`{_DIGEST_TAG}` = '{registration.digest}' and tags.`{_VERSION_TAG}` = '{registration.version}'"
            )
            query = {"experiment_ids": [experiment], "filter": condition}
            runs = self._client.post("runs/search", query).get("runs") or []
        run = runs[-1] if runs else {}
        has_model = bool(self._client.get("registered-models/get", name=registration.model))
        versions = self._versions(registration.model, _DIGEST_TAG, registration.digest) if has_model else []
        numbers = [int(item["version"]) for item in versions if item.get("source") == registration.source]
        alias = self._alias(registration.model, registration.alias) if has_model else {}
        return ObservedRegistry(
            experiment=experiment,
            run=str(member(run, "info", "run_id")),
            run_status=str(member(run, "info", "status")),
            has_metrics=len(member(run, "data", "metrics") or ()) >= len(registration.metrics),
            has_model=has_model,
            registered_version=str(min(numbers, default="")),
            alias_version=str(member(alias, "version")),
        )

    def _versions(self, model: str, tag: str, value: str) -> list[Any]:
        condition = f"name = '{model}' and tags.`{tag}` = '{value}'"
        return self._client.get("model-versions/search", filter=condition).get("model_versions") or []

    def _alias(self, model: str, alias: str) -> Any:
        """Return the model version that an alias points to, or an empty value."""
        return member(self._client.get("registered-models/alias", name=model, alias=alias), "model_version")

    def _write(self, write: NextWrite, registration: Registration, observed_state: ObservedRegistry) -> None:
        now, post = round(time.time() * 1000), self._client.post
        match write:
            case "experiment":
                post("experiments/create", {"name": registration.model})
            case "run":
                run = {"experiment_id": observed_state.experiment, "run_name": registration.version, "start_time": now}
                post("runs/create", {**run, "tags": registration.tags})
            case "log":
                batch = {
                    "metrics": metric_entries(registration.metrics, now),
                    "params": param_entries(registration.facts),
                }
                post("runs/log-batch", {"run_id": observed_state.run, **batch})
            case "finish":
                post("runs/update", {"run_id": observed_state.run, "status": "FINISHED", "end_time": now})
            case "model":
                post("registered-models/create", {"name": registration.model})
            case "version":
                verdict = registration.facts.get("mergegate.verdict", "")
                version = {"name": registration.model, "source": registration.source, "run_id": observed_state.run}
                version["description"] = f"Release {registration.version} by mergegate: {verdict}"
                post("model-versions/create", {**version, "tags": registration.tags})
            case "alias":
                alias = {
                    "name": registration.model,
                    "alias": registration.alias,
                    "version": observed_state.registered_version,
                }
                post("registered-models/alias", alias)

    def _retry(self, request: Callable[[], Any]) -> Any:
        for failures in range(_FAILURES):
            try:
                return request()
            except MlflowError as error:
                if failures == _FAILURES - 1 or not error.is_transient:
                    raise self._refusal(error) from None
                time.sleep(min(2.0**failures, _MAX_WAIT_S))
        raise AssertionError("the last failure raises")

    def _refusal(self, error: MlflowError) -> Refused:
        if error.is_transient:
            return Refused(
                self.url,
                found=f"MLflow does not answer as expected: {error}",
                expected="a valid answer",
                remedy="run again later; mergegate resumes the registration",
            )
        is_denied = error.status in (401, 403)
        return Refused(
            self.url,
            found=f"MLflow rejects the request: {error}",
            expected="a registry that accepts a model version",
            remedy="export MLFLOW_TRACKING_TOKEN of a user with write access"
            if is_denied
            else "correct the problem that the server reports",
        )
