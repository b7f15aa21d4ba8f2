"""Define the MLflow target, which publishes to another target and registers a model version that points there."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.publish.targets.contract import (
    CredentialUse,
    CurrentRelease,
    PublishedRelease,
    PublishRequest,
    PublishTarget,
    Release,
    no_such_version,
    require_alias_name,
)
from mergegate.tasks.publish.targets.hub import HubTarget
from mergegate.tasks.publish.targets.mlflow_registration import MlflowRegistry, describe_release
from mergegate.tasks.publish.targets.oci import OciTarget
from mergegate.tasks.publish.targets.s3 import S3Target

_NAME = re.compile(r"models:/(?P<model>[^/@\s]+)(?:/(?P<version>\d+)|@(?P<alias>[\w.-]+))")


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
        """Return the reference to the version at ``storage``."""
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
        """Return an earlier release at ``storage``."""
        return self.storage.earlier_release(root, version)

    def current_head(self, root: Path) -> str | None:
        """Return the head of the current release at ``storage``, or None."""
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
        """Return a small file of a version at ``storage``, or None."""
        return self.storage.published_file(root, version, name)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move an alias of the registered model. MLflow's versions are numbers, so no alias can be a version."""
        require_alias_name(name, {self.alias, "latest"})
        if not self._registry().move_alias(self.model, version, name):
            raise no_such_version(version, f"{self.model} in MLflow")

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the release version that the alias points to, or None."""
        return self._registry().alias_version(self.model, name) or None

    @classmethod
    def open(cls, reference: str) -> PublishedRelease | None:
        """Open ``models:/name@alias`` or ``models:/name/number`` at the server in ``MLFLOW_TRACKING_URI``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        try:
            registry = _registry_at(None, reference)
            source = registry.source(match["model"], alias=match["alias"], number=match["version"])
        except Refused as error:
            raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
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
