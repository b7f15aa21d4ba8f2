"""Define the S3 target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.alias import require_alias_name
from mergegate.tasks.publish.targets.contract import CurrentRelease, OnProgress, PublishTarget, Release
from mergegate.tasks.publish.targets.s3.access import S3_URL, S3Location, require_boto3, s3_location
from mergegate.tasks.publish.targets.s3.aliases import move_alias, read_alias
from mergegate.tasks.publish.targets.s3.publication import WHOLE_UP_TO, publish_s3
from mergegate.tasks.publish.targets.s3.release import (
    S3Release,
    download_current,
    download_named,
    in_words,
    open_in_bucket,
)
from mergegate.tasks.publish.targets.s3.state import POINTER


class S3Target(PublishTarget):
    """A prefix in a bucket: every version under its own path, and ``latest.json``, which names the current version.

    boto3 finds credentials, region and certificates.
    """

    known_as: ClassVar[str] = "s3://bucket/prefix@version"
    renamed_keys: ClassVar[Mapping[str, str]] = {"parts_above": "multipart_threshold"}

    to: Literal["s3"]
    url: str = Field(
        pattern=S3_URL, description="s3://bucket/prefix; the bucket exists, the prefix is of this release alone."
    )
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s@]+/?$",
        description="Where it is not Amazon's: http(s)://host[:port]; absent: AWS_ENDPOINT_URL_S3, or Amazon.",
    )
    multipart_threshold: int = Field(
        default=WHOLE_UP_TO,
        ge=5 << 20,
        le=WHOLE_UP_TO,
        description="Bytes. Larger files travel in parts: safer on a bad line, but then 'verify' has to download them.",
    )

    @property
    def address(self) -> str:
        return self._place().url

    def check(self, root: Path) -> None:
        """Raise an error if the bucket cannot be listed or written. An upload is started and aborted."""
        require_boto3("publish.to: s3")
        location = self._place()

        def try_it() -> None:
            location.ask("head_bucket")
            key = location.key(".listings/check")
            begun = location.ask("create_multipart_upload", Key=key)
            location.ask("abort_multipart_upload", Key=key, UploadId=begun["UploadId"])

        in_words(location, try_it)

    def current(self, root: Path) -> CurrentRelease | None:
        """Download the release that the pointer names. Its head is the entity tag of the pointer."""
        require_boto3("publish.to: s3")
        return download_current(self._place())

    def earlier(self, root: Path, version: str) -> CurrentRelease | None:
        """Download a version that the pointer lists."""
        require_boto3("publish.to: s3")
        return download_named(self._place(), version)

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
        """Send the files of the version, then move the pointer."""
        require_boto3("publish.to: s3")
        location = self._place()
        new = publish_s3(
            files,
            location,
            version,
            expected_head=expected_head,
            on_progress=on_progress,
            whole_up_to=self.multipart_threshold,
        )
        return Release(name, version, f"{location.url}@{version}", location.url, new)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Write ``name.json`` next to the pointer."""
        require_alias_name(name, {POINTER.removesuffix(".json")})
        require_boto3("publish.to: s3")
        location = self._place()
        in_words(location, move_alias, location, version, name)

    def aliased(self, root: Path, name: str) -> str | None:
        """Return the version in ``name.json``."""
        require_boto3("publish.to: s3")
        location = self._place()
        alias = in_words(location, read_alias, location, name)
        return alias[0].version if alias else None

    @classmethod
    def open(cls, reference: str) -> S3Release | None:
        """Open ``s3://bucket/prefix[@version or alias]``, at Amazon or at the store of ``AWS_ENDPOINT_URL_S3``."""
        return open_in_bucket(reference)

    def _place(self) -> S3Location:
        return s3_location(self.url, self.endpoint, "publish.url")
