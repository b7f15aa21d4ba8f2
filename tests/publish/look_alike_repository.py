"""Model a Hugging Face Hub repository: commits, branches and tags in memory, and large files by sha256."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGE = re.compile(r".*\.(safetensors|bin|gguf|pt|model|zip|parquet|npz)")


class Denied(Exception):
    """Error answer with a status, a message and the error code that the client checks."""

    def __init__(self, status: int, message: str, code: str = "", **body: object) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


@dataclass(frozen=True)
class Stored:
    """A file in a tree. Small files hold their ``data``. Large files have a ``sha256`` and are stored elsewhere."""

    size: int
    blob: str  # git ID of the data, or of the pointer to a large file
    data: bytes = b""
    sha256: str | None = None
    xet: str | None = None


def plain(data: bytes) -> Stored:
    """Return a small file."""
    return Stored(len(data), _blob(data), data)


def large(sha256: str, size: int, xet: str | None) -> Stored:
    """Return a file in large file storage."""
    return Stored(size, _blob(pointer(sha256, size)), sha256=sha256, xet=xet)


def pointer(sha256: str, size: int) -> bytes:
    """Return the pointer that git stores in place of a large file (git-lfs specification)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A tree and its parent commit."""

    id: str
    parent: str | None
    title: str
    tree: Mapping[str, Stored]


@dataclass
class Repository:
    """A model repository. Like on the Hub, it starts with one commit that contains .gitattributes."""

    id: str
    private: bool
    gated: str | bool = False
    card_data: Mapping[str, object] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.add("main", None, "initial commit", {".gitattributes": plain(b"*.safetensors filter=lfs\n")})

    def add(self, branch: str, parent: str | None, title: str, tree: Mapping[str, Stored]) -> Commit:
        """Add a commit with this tree and move ``branch`` to it."""
        what = f"{parent} {title} {next(self._numbers)} {sorted((name, file.blob) for name, file in tree.items())}"
        commit = Commit(hashlib.sha1(what.encode()).hexdigest(), parent, title, dict(tree))
        self.commits[commit.id] = commit
        self.branches[branch] = commit.id
        return commit

    def write(self, branch: str, title: str, lines: list[dict[str, dict[str, object]]], objects: Objects) -> Commit:
        """Apply the lines of a commit request atomically and return the new commit."""
        if branch not in self.branches:
            raise Denied(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        head = self.branches[branch]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, head):
            raise Denied(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(self.commits[head].tree)
        for line in lines:
            value = line["value"]
            path = str(value.get("path"))
            match line["key"]:
                case "file":
                    tree[path] = plain(base64.b64decode(str(value["content"])))
                case "lfsFile":
                    tree[path] = objects.named(str(value["oid"]), path)
                case "deletedFile":
                    if tree.pop(path, None) is None:
                        raise Denied(404, "A file with this name doesn't exist", "EntryNotFound")
        return self.add(branch, head, title, tree)

    def at(self, revision: str) -> Commit:
        """Return the commit for a branch, a tag or a full commit ID."""
        commit = self.branches.get(revision) or self.tags.get(revision) or revision
        if commit not in self.commits:
            raise Denied(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[commit]

    def history(self, revision: str = "main") -> list[Commit]:
        """Return the commits up to a revision, newest first."""
        found = [self.at(revision)]
        while found[-1].parent is not None:
            found.append(self.commits[found[-1].parent])
        return found


@dataclass(frozen=True)
class Objects:
    """Large files below ``root``: LFS objects by sha256, and the directory where the real hf_xet stores its data."""

    root: Path
    xet: bool

    def __post_init__(self) -> None:
        (self.root / "lfs").mkdir(parents=True, exist_ok=True)

    @property
    def cas(self) -> Path:
        return (self.root / "cas").resolve()

    def place(self, sha256: str) -> Path:
        return self.root / "lfs" / sha256

    def keep(self, file: Path) -> Stored:
        """Store a large file as if a client had uploaded it."""
        data = file.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        self.place(sha256).write_bytes(data)
        return large(sha256, len(data), None)

    def named(self, sha256: str, path: str) -> Stored:
        """Return an uploaded large file for a commit, or deny the commit if the file was never uploaded."""
        if self.xet and (found := self._in_xet(sha256)):
            return large(sha256, found[1], found[0])
        if self.place(sha256).exists():
            return large(sha256, self.place(sha256).stat().st_size, None)
        raise Denied(400, f"LFS pointer pointed to a file that does not exist: {path}")

    def _in_xet(self, sha256: str) -> tuple[str, int] | None:
        for shard in self.cas.rglob("shards/*.mdb"):
            for xet, content, size in files_of_shard(shard.read_bytes()):
                if content == sha256:
                    return xet, size
        return None


_RECORD = 48  # bytes; every structure in a shard is a multiple of this size
_END = b"\xff" * 32


def files_of_shard(data: bytes) -> Iterator[tuple[str, str | None, int]]:
    """Yield (Xet hash, sha256, size) of each file that a Xet metadata shard describes.

    A file consists of a header (hash, flags, number of segments), its segments, one verification record per segment if
    flag bit 31 is set, and a record with the sha256 if bit 30 is set.
    """
    place = _RECORD
    while data[place : place + 32] not in (_END, b""):
        name, flags, segments = struct.unpack_from("<32sII", data, place)
        size = sum(
            struct.unpack_from("<I", data, place + _RECORD * number + 36)[0] for number in range(1, segments + 1)
        )
        place += _RECORD * (1 + segments * (2 if flags >> 31 & 1 else 1))
        sha256 = None
        if flags >> 30 & 1:
            sha256 = _hex(data[place : place + 32])
            place += _RECORD
        yield _hex(name), sha256, size


def _hex(data: bytes) -> str:
    """Return a hash in Xet's text form: four little-endian 64-bit numbers in hexadecimal."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))
