"""Define the MLflow target, which publishes to another target and registers a model version that points there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.alias import no_such_version, require_alias_name
from mergegate.tasks.publish.targets.contract import (
    CurrentRelease,
    OnProgress,
    PublishedRelease,
    PublishTarget,
    Release,
)
from mergegate.tasks.publish.targets.hub import HubTarget
from mergegate.tasks.publish.targets.mlflow.registration import MlflowRegistry, registration_of, require_tracking
from mergegate.tasks.publish.targets.oci import OciTarget
from mergegate.tasks.publish.targets.s3 import S3Target

_NAME = re.compile(r"models:/(?P<model>[^/@\s]+)(?:/(?P<version>\d+)|@(?P<alias>[\w.-]+))")
_PLACES = (HubTarget, S3Target, OciTarget)


class MlflowTarget(PublishTarget):
    """A registered model in MLflow whose versions point to releases at ``storage``. An alias marks the current version.

    The token comes from ``MLFLOW_TRACKING_TOKEN``. An alias has no guard against concurrent writers: the last one wins.
    ``storage`` has a guard and is published to first.
    """

    known_as: ClassVar[str] = "models:/name@champion of MLflow"
    renamed_keys: ClassVar[Mapping[str, str]] = {"place": "storage"}

    to: Literal["mlflow"]
    model: str = Field(pattern=r"^[A-Za-z0-9][\w. -]*$", description="Name of the registered model.")
    storage: Annotated[HubTarget | S3Target | OciTarget, Field(discriminator="to", description="Where it stands.")]
    tracking_uri: str | None = Field(
        default=None, pattern=r"^https?://[^\s@]+$", description="MLflow's server; absent: MLFLOW_TRACKING_URI."
    )
    alias: str = Field(default="champion", pattern=r"^[A-Za-z][\w-]*$", description="Which means the current version.")

    @property
    def is_public(self) -> bool:
        return self.storage.is_public

    @property
    def address(self) -> str:
        return self.storage.address

    def check(self, root: Path) -> None:
        """Check ``storage``, and that MLflow's server answers."""
        registry = self._registry()
        self.storage.check(root)
        registry.check()

    def current(self, root: Path) -> CurrentRelease | None:
        """Return the current release at ``storage``. It is complete once the alias points to it."""
        release = self.storage.current(root)
        if release is None:
            return None
        source = self._registry().source_of(self.model, alias=self.alias)
        return replace(release, complete=release.complete and self._is_at(source, release))

    def earlier(self, root: Path, version: str) -> CurrentRelease | None:
        """Return an earlier release at ``storage``."""
        return self.storage.earlier(root, version)

    def publish(
        self,
        files: Sequence[ReleaseFile],
        name: str,
        version: str,
        root: Path,
        *,
        expected_head: str | None,
        hashes: HashMemo,
        on_progress: OnProgress,
    ) -> Release:
        """Publish to ``storage``, then register the version and point the alias to it."""
        registry = self._registry()
        released = self.storage.publish(
            files, name, version, root, expected_head=expected_head, hashes=hashes, on_progress=on_progress
        )
        source = f"{self.storage.address}@{version}" if isinstance(self.storage, HubTarget) else str(released.location)
        registration = registration_of(files, self.model, version, self.alias, source)
        number, changed = registry.register(registration)
        location = f"models:/{self.model}/{number}"
        return Release(name, version, location, f"{self.model} in MLflow", released.new or changed)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move an alias of the registered model. MLflow's versions are numbers, so no alias can be a version."""
        require_alias_name(name, {self.alias, "latest"})
        if not self._registry().move_alias(self.model, version, name):
            raise no_such_version(version, f"{self.model} in MLflow")

    def aliased(self, root: Path, name: str) -> str | None:
        """Return the release version that the alias points to."""
        return self._registry().version_at(self.model, name) or None

    @classmethod
    def open(cls, reference: str) -> PublishedRelease | None:
        """Open ``models:/name@alias`` or ``models:/name/number`` at the server in ``MLFLOW_TRACKING_URI``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        try:
            registry = MlflowRegistry(require_tracking(os.environ.get("MLFLOW_TRACKING_URI"), reference), _token())
            source = registry.source_of(match["model"], match["version"] or "", match["alias"] or "")
        except Refused as error:
            raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
        for target in _PLACES:
            if source and (release := target.open(source)) is not None:
                return release
        raise InvalidInput(
            reference,
            found=f"it stands at {source!r}, which is no release of mergegate"
            if source
            else "no such version or alias",
            expected="a version that mergegate has registered",
            remedy="check the spelling",
        )

    def _is_at(self, source: str, current: CurrentRelease) -> bool:
        """Return whether ``source``, the location of a registered version, is the current release at ``storage``."""
        if not isinstance(self.storage, HubTarget):
            return source == str(current.location)
        try:  # on the Hub a version is a tag, so compare the commits
            release = HubTarget.open(source)
        except InvalidInput:
            return False
        return release is not None and release.commit == current.head

    def _registry(self) -> MlflowRegistry:
        uri = require_tracking(self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), "publish.tracking_uri")
        return MlflowRegistry(uri, _token())


def _token() -> str:
    return os.environ.get("MLFLOW_TRACKING_TOKEN", "")
