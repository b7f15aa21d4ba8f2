"""Define the MLflow target, which publishes to another target and registers a model version that points there.

mergegate searches each entry before it writes the entry, so it can continue after a lost answer or a kill. An MLflow
run records scores, drops with their intervals, and the inputs of the merge. A version of the registered model points to
the location of the release and to this run. The alias is written last. mergegate finds existing entries by the digest
of the release.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.http import retry_transient
from mergegate.tasks.base.store import digest
from mergegate.tasks.release.publish.content import (
    PROVENANCE,
    ReleaseFile,
    content_digest,
    file_identities,
    read_document,
)
from mergegate.tasks.release.publish.targets.contract import (
    CredentialUse,
    CurrentRelease,
    PublishedRelease,
    PublishRequest,
    PublishTarget,
    Release,
)
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.publish.targets.oci import OciTarget
from mergegate.tasks.release.publish.targets.s3 import S3Target
from mergegate.tasks.release.telemetry import (
    MlflowClient,
    MlflowError,
    member,
    metric_entries,
    mlflow_key,
    param_entries,
    tag_entries,
)

T = TypeVar("T")
_DIGEST_TAG, _VERSION_TAG = "mergegate.digest", "mergegate.version"
_TIMEOUT_S = 60.0
_ATTEMPTS = 6
_NAME = re.compile(r"models:/(?P<model>[^/@\s]+)(?:/(?P<version>\d+)|@(?P<alias>[\w.-]+))")


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
        return tag_entries({_DIGEST_TAG: self.digest, _VERSION_TAG: self.version, **self.facts})


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


@dataclass(frozen=True)
class MlflowRegistry:
    """Client of MLflow's server. It retries requests after transient errors.

    Every method raises Refused if the server rejects a request or does not answer.
    """

    url: str
    token: str = ""

    def register(self, registration: Registration) -> tuple[str, bool]:
        """Write the missing entries of a release, the alias last, so that it always points to a complete registration.

        Return the number of the registered version, and whether anything was written.
        """
        client, model, writes = self.client, registration.model, list[str]()
        now = round(time.time() * 1000)

        def ensure(find: Callable[[], T], path: str, body: Mapping[str, object]) -> T:
            """Return an entry, and create it if it is missing. After a lost answer, search again before creating it."""

            def attempt() -> T:
                if entry := find():
                    return entry
                writes.append(path)
                client.post(path, body)
                if not (entry := find()):
                    raise MlflowError("the written entries are missing afterwards")
                return entry

            return self._retry(attempt)

        def has_model() -> bool:
            return bool(client.get("registered-models/get", name=model))

        def find_number() -> str:
            versions = self.versions(model, _DIGEST_TAG, registration.digest) if has_model() else []
            numbers = [int(item["version"]) for item in versions if item.get("source") == registration.source]
            return str(min(numbers, default=""))

        if not (number := self._retry(find_number)):
            name = {"name": model}
            experiment = ensure(lambda: client.experiment_id(model), "experiments/create", name)
            identity = ((_DIGEST_TAG, registration.digest), (_VERSION_TAG, registration.version))
            condition = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in identity)

            def find_run() -> Any:
                query = {"experiment_ids": [experiment], "filter": condition}
                return (client.post("runs/search", query).get("runs") or [{}])[-1]

            start = {"experiment_id": experiment, "run_name": registration.version, "start_time": now}
            run = member(ensure(find_run, "runs/create", {**start, "tags": registration.tags}), "info", "run_id")
            metrics, params = metric_entries(registration.metrics, now), param_entries(registration.facts)
            ensure(
                lambda: len(member(find_run(), "data", "metrics") or ()) >= len(registration.metrics),
                "runs/log-batch",
                {"run_id": run, "metrics": metrics, "params": params},
            )
            ensure(
                lambda: member(find_run(), "info", "status") == "FINISHED",
                "runs/update",
                {"run_id": run, "status": "FINISHED", "end_time": now},
            )
            ensure(has_model, "registered-models/create", name)
            verdict = registration.facts.get("mergegate.verdict", "")
            version = {**name, "source": registration.source, "run_id": run, "tags": registration.tags}
            version["description"] = f"Release {registration.version} by mergegate: {verdict}"
            number = ensure(find_number, "model-versions/create", version)
        ensure(
            lambda: str(member(self.alias(model, registration.alias), "version")) == number,
            "registered-models/alias",
            {"name": model, "alias": registration.alias, "version": number},
        )
        return number, bool(writes)

    def source(self, model: str, *, alias: str = "", number: str = "") -> str:
        """Return the location of the release that ``alias`` or ``number`` of ``model`` names, or an empty string."""
        if alias:
            return str(member(self._retry(lambda: self.alias(model, alias)), "source"))
        answer = self._retry(lambda: self.client.get("model-versions/get", name=model, version=number))
        return str(member(answer, "model_version", "source"))

    def alias_version(self, model: str, alias: str) -> str:
        """Return the release version that an alias points to, or an empty string without one."""
        tags = member(self._retry(lambda: self.alias(model, alias)), "tags") or ()
        return next((str(tag["value"]) for tag in tags if tag["key"] == _VERSION_TAG), "")

    def move_alias(self, model: str, version: str, alias: str) -> bool:
        """Point ``alias`` to the last registration of the release ``version``. Idempotent.

        Return false if the version is not registered.
        """
        versions = self._retry(lambda: self.versions(model, _VERSION_TAG, version))
        if not versions:
            return False
        number = str(max(int(item["version"]) for item in versions))
        if str(member(self._retry(lambda: self.alias(model, alias)), "version")) != number:
            body = {"name": model, "alias": alias, "version": number}
            self._retry(lambda: self.client.post("registered-models/alias", body))
        return True

    def check(self) -> None:
        self._retry(lambda: self.client.get("registered-models/search", max_results="1"))

    @cached_property
    def client(self) -> MlflowClient:
        return MlflowClient(self.url, _TIMEOUT_S, self.token)

    def versions(self, model: str, tag: str, value: str) -> list[Any]:
        condition = f"name = '{model}' and tags.`{tag}` = '{value}'"
        return self.client.get("model-versions/search", filter=condition).get("model_versions") or []

    def alias(self, model: str, alias: str) -> Any:
        return member(self.client.get("registered-models/alias", name=model, alias=alias), "model_version")

    def _retry(self, request: Callable[[], T]) -> T:
        try:
            return retry_transient(
                _ATTEMPTS,
                transient=lambda error: isinstance(error, MlflowError) and error.is_transient,
                sleep=lambda seconds: time.sleep(seconds),
            )(request)
        except MlflowError as error:
            raise self._refusal(error) from None

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


class MlflowTarget(PublishTarget):
    """A registered model in MLflow whose versions point to releases at ``storage``. An alias marks the current version.

    The token comes from ``MLFLOW_TRACKING_TOKEN``. An alias has no guard against concurrent writers: the last one wins.
    ``storage`` has a guard and is published to first.
    """

    reference_form: ClassVar[str] = "models:/name@champion of MLflow"

    to: Literal["mlflow"]
    model: str = Field(pattern=r"^[A-Za-z0-9][\w. -]*$", description="Name of the registered model.")
    storage: Annotated[
        HubTarget | S3Target | OciTarget, Field(discriminator="to", description="Target that stores the release.")
    ]
    tracking_uri: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@]+$",
        description="Address of MLflow's server. Default: MLFLOW_TRACKING_URI.",
    )
    alias: str = Field(
        default="champion",
        pattern=r"^[A-Za-z][\w-]*$",
        description="Alias that points to the current version. Default: champion.",
    )

    @property
    def is_public(self) -> bool:
        return self.storage.is_public

    @property
    def address(self) -> str:
        return self.storage.address

    @property
    def hub_id(self) -> str | None:
        return self.storage.hub_id

    def reference_to(self, version: str) -> str:
        return self.storage.reference_to(version)

    def check(self, root: Path) -> CredentialUse | None:
        """Check ``storage``, and that MLflow's server answers. Return the credential of ``storage``."""
        registry = self._registry()
        credential = self.storage.check(root)
        registry.check()
        return credential

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Return the current release at ``storage``. It is complete if the alias points to it."""
        release = self.storage.current_release(root)
        if release is None:
            return None
        source = self._registry().source(self.model, alias=self.alias)
        is_registered = source == str(release.location)
        if isinstance(self.storage, HubTarget):  # on the Hub a version is a tag, so compare the commits
            try:
                registered = HubTarget.open(source)
                is_registered = registered is not None and registered.commit == release.head
            except InvalidInput:
                is_registered = False
        return replace(release, complete=release.complete and is_registered)

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        return self.storage.earlier_release(root, version)

    def current_head(self, root: Path) -> str | None:
        return self.storage.current_head(root)

    def for_variants(self, suffix: str) -> MlflowTarget:
        """Return the registered model ``name-SUFFIX``, with its files next to those of this one."""
        storage = self.storage.for_variants(suffix)
        return self._with_settings(suffix, model=f"{self.model}-{suffix}", storage=storage.model_dump())

    def publish(self, request: PublishRequest) -> Release:
        """Publish to ``storage``, then register the version and point the alias to it."""
        registry, version = self._registry(), request.version
        release = self.storage.publish(request)
        source = f"{self.storage.address}@{version}" if isinstance(self.storage, HubTarget) else str(release.location)
        registration = describe_release(request.files, self.model, version, self.alias, source)
        number, has_changed = registry.register(registration)
        location = f"models:/{self.model}/{number}"
        return Release(request.name, version, location, f"{self.model} in MLflow", release.new or has_changed)

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        return self.storage.published_file(root, version, name)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move an alias of the registered model. MLflow's versions are numbers, so no alias can be a version."""
        self._require_alias_name(name, self.alias, "latest")
        if not self._registry().move_alias(self.model, version, name):
            raise self._no_such_version(version, location=f"{self.model} in MLflow")

    def resolve_alias(self, root: Path, name: str) -> str | None:
        return self._registry().alias_version(self.model, name) or None

    @classmethod
    def open(cls, reference: str) -> PublishedRelease | None:
        """Open ``models:/name@alias`` or ``models:/name/number`` at the server in ``MLFLOW_TRACKING_URI``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        registry = _registry_at(None, reference)
        source = registry.source(match["model"], alias=match["alias"], number=match["version"])
        for target in (HubTarget, S3Target, OciTarget):
            if source and (release := target.open(source)) is not None:
                return release
        raise InvalidInput(
            reference,
            found=f"its source {source!r} is not a release of mergegate" if source else "no such version or alias",
            expected="a version that mergegate registered",
            remedy="check the spelling",
        )

    def _registry(self) -> MlflowRegistry:
        return _registry_at(self.tracking_uri, "publish.tracking_uri")


def _registry_at(uri: str | None, setting: str) -> MlflowRegistry:
    """Return the registry at ``uri``, or else at ``MLFLOW_TRACKING_URI``. Raise InvalidInput without an HTTP URL."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri or not uri.startswith(("http://", "https://")):
        raise InvalidInput(
            setting,
            found=repr(uri) if uri else "no address",
            expected="http(s)://host of MLflow's server",
            remedy="set 'tracking_uri', or export MLFLOW_TRACKING_URI",
        )
    return MlflowRegistry(uri.rstrip("/"), os.environ.get("MLFLOW_TRACKING_TOKEN", ""))
