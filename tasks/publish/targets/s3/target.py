"""A place in a bucket as a target, by the contract of all targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.alias import require_alias_name
from mergegate.tasks.publish.targets.contract import CurrentRelease, OnProgress, PublishTarget, Release
from mergegate.tasks.publish.targets.s3.access import S3_URL, S3Place, require_boto3, s3_place
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
    """A place in a bucket: every version under its name, and ``latest.json``, which says which of them is current.

    Credentials, region and certificates are found as boto3 finds them.
    """

    known_as: ClassVar[str] = "s3://bucket/prefix@version"

    to: Literal["s3"]
    url: str = Field(
        pattern=S3_URL, description="s3://bucket/prefix; the bucket exists, the prefix is of this release alone."
    )
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s@]+/?$",
        description="Where it is not Amazon's: http(s)://host[:port]; absent: AWS_ENDPOINT_URL_S3, or Amazon.",
    )
    parts_above: int = Field(
        default=WHOLE_UP_TO,
        ge=5 << 20,
        le=WHOLE_UP_TO,
        description="Bytes. Larger files travel in parts: safer on a bad line, but then 'verify' has to download them.",
    )

    @property
    def address(self) -> str:
        return self._place().url

    def check(self, root: Path) -> None:
        """See that the bucket can be listed and written: an upload is begun there, and taken back."""
        require_boto3("publish.to: s3")
        place = self._place()

        def try_it() -> None:
            place.ask("head_bucket")
            key = place.key(".listings/check")
            begun = place.ask("create_multipart_upload", Key=key)
            place.ask("abort_multipart_upload", Key=key, UploadId=begun["UploadId"])

        in_words(place, try_it)

    def current(self, root: Path) -> CurrentRelease | None:
        """What the pointer names, downloaded. Its head is the pointer's entity tag."""
        require_boto3("publish.to: s3")
        return download_current(self._place())

    def earlier(self, root: Path, named: str) -> CurrentRelease | None:
        """A version that the pointer has named before, downloaded."""
        require_boto3("publish.to: s3")
        return download_named(self._place(), named)

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
        place = self._place()
        new = publish_s3(
            files, place, version, expected_head=expected_head, on_progress=on_progress, whole_up_to=self.parts_above
        )
        return Release(name, version, f"{place.url}@{version}", place.url, new)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Write ``name.json`` beside the pointer."""
        require_alias_name(name, {POINTER.removesuffix(".json")})
        require_boto3("publish.to: s3")
        place = self._place()
        in_words(place, move_alias, place, version, name)

    def aliased(self, root: Path, name: str) -> str | None:
        """What ``name.json`` says."""
        require_boto3("publish.to: s3")
        place = self._place()
        found = in_words(place, read_alias, place, name)
        return found[0].version if found else None

    @classmethod
    def open(cls, named: str) -> S3Release | None:
        """``s3://bucket/prefix[@version or alias]``; where it is not Amazon's, ``AWS_ENDPOINT_URL_S3`` says where."""
        return open_in_bucket(named)

    def _place(self) -> S3Place:
        return s3_place(self.url, self.endpoint, "publish.url")
