"""Keep absolute paths of this machine out of everything that is published.

`PublicNames` renames local models, texts and directories before a report, a card or a provenance is written.
`require_no_private_paths` then scans every file of a release, for any target, and refuses to publish a file that still
contains one.
"""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

import yaml
from pydantic import BaseModel

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.merge_core.recipe import Recipe, expand_user_path, parse_reference
from mergegate.tasks.checkpoints import PinnedCheckpoint, ResolvedCheckpoint
from mergegate.tasks.publish.content import ReleaseFile

V = TypeVar("V")
_WEIGHTS = ".safetensors"
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library allows
# A path ends here only if no further name characters follow.
_END = r"(?![\w-]|\.\w)"
_URL = r"(?:file:(?://(?:localhost)?)?)?"


@dataclass(frozen=True)
class PublicNames:
    """Public names of local paths.

    Attributes:
        names: Local path, as written or resolved, -> its name in published files.
    """

    names: Mapping[str, str]

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        parents: Iterable[PinnedCheckpoint | ResolvedCheckpoint],
        root: Path,
        paths: Iterable[str] = (),
    ) -> PublicNames:
        """Return the names for the release of a recipe.

        A path below the directory of the recipe is named relative to it. Any other absolute path is named by its last
        component, and by more components if two names would be equal.

        Args:
            recipe: The recipe as its author wrote it.
            parents: Its models.
            root: Directory of the profile.
            paths: Other paths that may occur, such as those of the profile and of other recipes. They never change
                the names of the recipe's own paths.
        """
        base = recipe.directory or root
        written = tuple(recipe_paths(recipe))
        directories = (str(path) for parent in parents for path in parent.directories if path.is_absolute())
        names: dict[str, str] = {}
        for texts in ((*written, *directories), tuple(paths)):
            private = {text: _normal(text) for text in texts if _is_private(text) and text not in names}
            # Two spellings of one directory have one name: that of the first.
            targets = {os.path.realpath(path): path for path in reversed(private.values())}
            taken = {*(text for text in written if not _is_private(text)), *names.values()}
            public = _short_names(targets.values(), base, taken)
            for text, path in private.items():
                name = public[targets[os.path.realpath(path)]]
                names |= {text: name, path: names.get(path, name)}
        for directory in (root, base):
            names |= dict.fromkeys((os.path.abspath(directory), os.path.realpath(directory)), ".")  # noqa: PTH100
        return cls({path: name for path, name in names.items() if path != "/"})

    def text(self, text: str) -> str:
        """Return `text` with every local path renamed."""
        if not self.names or not any(path in text for path in self.names):
            return text
        return _pattern(tuple(self.names)).sub(lambda match: self.names[match[1]], text)

    def apply(self, value: V) -> V:
        """Return `value` with every local path in its strings renamed, also in keys and in fields of models."""
        return self._applied(value)  # type: ignore[no-any-return]  # the same type comes back

    def _applied(self, value: Any) -> Any:
        if type(value) is str:
            return self.text(value)
        if isinstance(value, BaseModel):
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            changed = {name: new for name, old in fields.items() if (new := self._applied(old)) is not old}
            return value.model_copy(update=changed) if changed else value
        if isinstance(value, Mapping):
            renamed: Any = {self._applied(key): self._applied(item) for key, item in value.items()}
            return value if renamed == value else renamed
        if type(value) in (list, tuple):
            items = type(value)(self._applied(item) for item in value)
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value

    def yaml(self, text: str) -> str:
        """Return the YAML in `text` with every local path renamed, including quoted and escaped ones."""
        names = PublicNames({str(Path.home()): "~"} | dict(self.names)) if str(Path.home()) != "/" else self
        renamed, expected = names.text(text), [names.apply(document) for document in parse_yaml(text, "recipe")]
        with suppress(InvalidInput):
            if parse_yaml(renamed, "recipe") == expected:
                return renamed
        return yaml.safe_dump_all(expected, sort_keys=False, allow_unicode=True)


def recipe_paths(recipe: Recipe) -> Iterator[str]:
    """Yield every path and Hub id in a recipe: of models, adapters, tokenizers and texts."""
    for document in (*recipe.steps, recipe):
        for reference in document.own_references():
            yield reference.path
            if reference.adapter:
                yield parse_reference(reference.adapter, recipe.location).path
        yield from document.texts.values()


def require_no_private_paths(files: Sequence[ReleaseFile], directories: Iterable[Path], name: str) -> None:
    """Raise Refused if a file of a release contains an absolute path of this machine.

    Args:
        files: Files of the release. In weight files only the header is scanned, in other files all bytes.
        directories: Directories of the project and of its models. The user's home, the working directory and the
            directory for temporary files are added.
        name: Name of the release, for the message.
    """
    own = {os.path.abspath(path) for path in directories} | {str(Path.cwd())}  # noqa: PTH100
    own |= {str(Path.home()), tempfile.gettempdir()}
    own |= {os.path.realpath(path) for path in own}
    spellings = {spelling: path for path in sorted(own - {"/"}) for spelling in _spellings(path)}
    for file in files:
        content = _scanned(file)
        for spelling, path in spellings.items():
            leak = next(_leaks(content, spelling, path), None) if spelling in content else None
            if leak is not None:
                raise Refused(
                    f"{name}: {file.name}",
                    found=f"a path of this machine: {leak}",
                    expected="relative paths or names only in published files",
                    remedy="remove the path from the recipe, the profile or the file of the parent that it comes from, "
                    "then run again; nothing was published",
                )


def _leaks(content: bytes, spelling: bytes, path: str) -> Iterator[str]:
    """Yield each occurrence of `path` in `content`, including the name that follows it.

    ``/tmp`` and ``/root`` also occur in vocabularies and answers. So a directory with one component counts only with a
    following name that exists in it.
    """
    separator = rb"(?:\\?/|%2[fF])"
    left = rb"(?<![\w.~-])" if path.count("/") == 1 else b""
    pattern = re.compile(left + re.escape(spelling) + _END.encode() + rb"(?:" + separator + rb"([\w.@+~ -]*))?")
    for match in pattern.finditer(content):
        if path.count("/") == 1 or path in (str(Path.home()), tempfile.gettempdir()):
            first = (match[1] or b"").decode(errors="replace").strip(". ")
            if first and not os.path.lexists(os.path.join(path, first)):  # noqa: PTH118  # names a stranger wrote
                continue
            if not first and path.count("/") == 1:
                continue
        yield match[0].decode(errors="replace")


def _spellings(path: str) -> set[bytes]:
    """Return the forms in which JSON, HTML and URLs write a path."""
    escaped = json.dumps(path, ensure_ascii=False)[1:-1]
    ascii_only = json.dumps(path)[1:-1]
    forms = {path, escaped, ascii_only, quote(path), quote(path, safe=""), html.escape(path)}
    forms |= {form.replace("/", "\\/") for form in (escaped, ascii_only)}
    return {form.encode(errors="surrogateescape") for form in forms}


def _scanned(file: ReleaseFile) -> bytes:
    """Return the bytes of a file that can hold text."""
    if not file.name.endswith(_WEIGHTS) or isinstance(file.source, bytes):
        return file.read()
    with file.source.open("rb") as weights:
        size = int.from_bytes(weights.read(8), "little")
        return weights.read(min(size, _MAX_HEADER_BYTES))


def _is_private(text: str) -> bool:
    """Return whether `text` can only be meant as a path of this machine."""
    return text.startswith(("/", "~", "file:"))


def _normal(text: str) -> str:
    """Return the absolute path that `text` names."""
    try:
        return os.path.normpath(expand_user_path(re.sub(f"^{_URL}", "", text)))
    except InvalidInput:
        return text


def _short_names(paths: Iterable[str], base: Path, taken: Iterable[str]) -> dict[str, str]:
    """Return a distinct name for each path; see `PublicNames.of`."""
    names: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for path in paths:
        for start in (os.path.abspath(base), os.path.realpath(base)):  # noqa: PTH100
            if PurePosixPath(path).is_relative_to(start) and path != start:
                names[path] = os.path.relpath(path, start)
        if path not in names:
            lengths[path] = 1
    taken = tuple(taken)
    while True:
        names |= {path: "/".join(PurePosixPath(path).parts[1:][-length:]) for path, length in lengths.items()}
        counts = Counter([*names.values(), *taken])
        longer = [
            path
            for path, length in lengths.items()
            if counts[names[path]] > 1 and length < len(PurePosixPath(path).parts) - 1
        ]
        if not longer:
            return names
        lengths |= {path: lengths[path] + 1 for path in longer}


def _pattern(paths: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of these paths, longest first; one of a single component must not follow another name."""
    parts = [
        (r"(?<![\w.~-])" if path.count("/") == 1 else "") + re.escape(path)
        for path in sorted(paths, key=len, reverse=True)
    ]
    return re.compile(f"{_URL}({'|'.join(parts)}){_END}")
