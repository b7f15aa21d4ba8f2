"""Define a target outside mergegate, as a third-party package would, through the documented extension point.

A shelf stores the files of all versions by their sha256, and one index that lists the files of each version::

    place/files/3f9a…      the bytes of a file
    place/index.json       {"current": "v2", "versions": {"v1": {"config.json": [2, "3f9a…"]}, "v2": {…}}}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish.targets import CurrentRelease, PublishRequest, PublishTarget, Release


class ShelfTarget(PublishTarget):
    """A shelf in a directory. Readers address it as ``shelf:PLACE@VERSION``."""

    reference_form: ClassVar[str] = "shelf:PLACE@VERSION"

    to: Literal["shelf"]
    place: Path
    open_to_all: bool = False

    @property
    def is_public(self) -> bool:
        return self.open_to_all

    @property
    def address(self) -> str:
        return f"shelf:{self.place}"

    def check(self, root: Path) -> None:
        if (root / self.place).is_file():
            raise Refused(f"publish.place: {self.place}", found="a file", expected="a shelf", remedy="name another")

    def current_release(self, root: Path) -> CurrentRelease | None:
        index = read_index(root / self.place)
        if (version := index["current"]) is None:
            return None
        directory = root / self.place / "out" / version
        directory.mkdir(parents=True, exist_ok=True)
        for name, (_, sha256) in index["versions"][version].items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / self.place / "files" / sha256, directory / name)
        return CurrentRelease(directory, head=version)

    def publish(self, request: PublishRequest) -> Release:
        shelf, version = request.root / self.place, request.version
        listing = {file.name: [file.size, file.sha256] for file in request.files}
        index = read_index(shelf)
        if (published := index["versions"].get(version)) is not None:
            if published != listing:
                raise Refused(f"{self.address}@{version}", found="other content", expected="what never changes")
            return Release(request.name, version, shelf, self.address, new=False)
        if request.expected_head is not None and index["current"] != request.expected_head:
            raise Refused(self.address, found=f"{index['current']} is current", expected=request.expected_head)
        (shelf / "files").mkdir(parents=True, exist_ok=True)
        for count, file in enumerate(request.files, 1):
            (shelf / "files" / file.sha256).write_bytes(file.read())
            request.on_progress(count, len(request.files))
        versions = {**index["versions"], version: listing}
        (shelf / "index.json").write_text(json.dumps({"current": version, "versions": versions}))
        return Release(request.name, version, shelf, self.address, new=True)

    @classmethod
    def open(cls, named: str) -> ShelfRelease | None:
        if not named.startswith("shelf:"):
            return None
        place, _, version = named.removeprefix("shelf:").partition("@")
        index = read_index(Path(place))
        version = version or index["current"] or ""
        if version not in index["versions"]:
            raise InvalidInput(named, found="no such version on this shelf", expected=cls.reference_form)
        return ShelfRelease(Path(place), version)


@dataclass(frozen=True)
class ShelfRelease:
    """A version on a shelf."""

    place: Path
    version: str

    @property
    def reference(self) -> str:
        return f"shelf:{self.place}@{self.version}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        listing = read_index(self.place)["versions"][self.version]
        return {name: (size, sha256) for name, (size, sha256) in listing.items()}

    def download(self) -> Path:
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        return (self.place / "files" / self.files()[name][1]).read_bytes()


def read_index(place: Path) -> dict[str, Any]:
    file = place / "index.json"
    empty: dict[str, Any] = {"current": None, "versions": {}}
    return json.loads(file.read_text()) if file.exists() else empty
