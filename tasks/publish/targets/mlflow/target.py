"""MLflow's model registry as a target: the release itself stands at another one, which the registered version names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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
    """A registered model of MLflow, whose versions point to releases at ``place``; an alias means the current one.

    The token comes from ``MLFLOW_TRACKING_TOKEN``. An alias has no guard: the last writer wins. ``place`` has one, and
    is asked first.
    """

    known_as: ClassVar[str] = "models:/name@champion of MLflow"

    to: Literal["mlflow"]
    model: str = Field(pattern=r"^[A-Za-z0-9][\w. -]*$", description="Name of the registered model.")
    place: Annotated[HubTarget | S3Target | OciTarget, Field(discriminator="to", description="Where it stands.")]
    tracking_uri: str | None = Field(
        default=None, pattern=r"^https?://[^\s@]+$", description="MLflow's server; absent: MLFLOW_TRACKING_URI."
    )
    alias: str = Field(default="champion", pattern=r"^[A-Za-z][\w-]*$", description="Which means the current version.")

    @property
    def is_public(self) -> bool:
        return self.place.is_public

    @property
    def address(self) -> str:
        return self.place.address

    def check(self, root: Path) -> None:
        """As the place does; and see that MLflow's server answers."""
        registry = self._registry()
        self.place.check(root)
        registry.check()

    def current(self, root: Path) -> CurrentRelease | None:
        """What is current at the place: that is guarded, the alias follows it. Complete when the alias has."""
        there = self.place.current(root)
        if there is None:
            return None
        named = self._registry().source_of(self.model, alias=self.alias)
        return replace(there, complete=there.complete and self._is_at(named, there))

    def earlier(self, root: Path, named: str) -> CurrentRelease | None:
        """An earlier release at the place."""
        return self.place.earlier(root, named)

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
        """Publish to the place, whole; then register the version, and have the alias mean it."""
        registry = self._registry()
        released = self.place.publish(
            files, name, version, root, expected_head=expected_head, hashes=hashes, on_progress=on_progress
        )
        source = f"{self.place.address}@{version}" if isinstance(self.place, HubTarget) else str(released.location)
        wanted = registration_of(files, self.model, version, self.alias, source)
        number, changed = registry.register(wanted)
        where = f"models:/{self.model}/{number}"
        return Release(name, version, where, f"{self.model} in MLflow", released.new or changed)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move the alias of the registered model. Versions are numbers there, so no alias can be one."""
        require_alias_name(name, {self.alias, "latest"})
        if not self._registry().move_alias(self.model, version, name):
            raise no_such_version(version, f"{self.model} in MLflow")

    def aliased(self, root: Path, name: str) -> str | None:
        """The release whose registered version the alias means."""
        return self._registry().version_at(self.model, name) or None

    @classmethod
    def open(cls, named: str) -> PublishedRelease | None:
        """``models:/name@alias`` or ``models:/name/number`` of the server in ``MLFLOW_TRACKING_URI``."""
        if not (form := _NAME.fullmatch(named)):
            return None
        try:
            registry = MlflowRegistry(require_tracking(os.environ.get("MLFLOW_TRACKING_URI"), named), _token())
            source = registry.source_of(form["model"], form["version"] or "", form["alias"] or "")
        except Refused as error:
            raise InvalidInput(named, found=error.found, expected=error.expected, remedy=error.remedy) from None
        for target in _PLACES:
            if source and (release := target.open(source)) is not None:
                return release
        raise InvalidInput(
            named,
            found=f"it stands at {source!r}, which is no release of mergegate"
            if source
            else "no such version or alias",
            expected="a version that mergegate has registered",
            remedy="check the spelling",
        )

    def _is_at(self, named: str, there: CurrentRelease) -> bool:
        """Whether ``named``, the source of a registered version, is what is current at the place."""
        if not isinstance(self.place, HubTarget):
            return named == str(there.location)
        try:  # a version of the Hub is a tag, which its commit does not say
            release = HubTarget.open(named)
        except InvalidInput:
            return False
        return release is not None and release.commit == there.head

    def _registry(self) -> MlflowRegistry:
        uri = require_tracking(self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), "publish.tracking_uri")
        return MlflowRegistry(uri, _token())


def _token() -> str:
    return os.environ.get("MLFLOW_TRACKING_TOKEN", "")
