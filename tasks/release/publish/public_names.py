"""Keep absolute paths of this machine out of everything that is published.

`PublicNames` renames local models, texts and directories before a report, a card or a provenance is written. Before
publication to any target, `require_no_private_paths` scans every file for remaining paths and refuses the release if it
finds one.
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

from mergegate.merge_core.checkpoint import read_gguf_header
from mergegate.merge_core.errors import InvalidInput, Refused, escape_invisible
from mergegate.merge_core.parsing import parse_yaml
from mergegate.merge_core.recipe import Recipe, expand_user_path, parse_reference
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, ResolvedCheckpoint
from mergegate.tasks.release.publish.content import ReleaseFile

V = TypeVar("V")
_SAFETENSORS, _GGUF = ".safetensors", ".gguf"
_MAX_HEADER_BYTES = 256_000_000  # the safetensors library allows 100 MB, and our reader of GGUF this
# A path ends here only if no further name characters follow.
_END = r"(?![\w-]|\.\w)"
_URL = r"(?:file:(?://(?:localhost)?)?)?"


@dataclass(frozen=True)
class PublicNames:
    """Name in published files for each local path, both as written and resolved."""

    names: Mapping[str, str]

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        parents: Iterable[PinnedCheckpoint | ResolvedCheckpoint],
        root: Path,
        paths: Iterable[str] = (),
    ) -> PublicNames:
        """Return the public names for the release of a recipe in a profile below ``root``.

        A path below the directory of the recipe is named relative to it. Any other absolute path is named by its last
        component, and by more components if two names would be equal. Unprintable characters are escaped. ``paths`` are
        other paths that may occur, such as those in the profile. They never change the names of those in this recipe.
        """
        base = recipe.directory or root
        written = tuple(recipe_paths(recipe))
        directories = (str(path) for parent in parents for path in parent.directories if path.is_absolute())
        names: dict[str, str] = {}
        for texts in ((*written, *directories), further := tuple(paths)):
            private: dict[str, str] = {}  # text -> absolute path that it names
            for text in texts:
                if _is_private(text) and text not in names:
                    try:
                        private[text] = os.path.normpath(expand_user_path(re.sub(f"^{_URL}", "", text)))
                    except InvalidInput:
                        private[text] = text
            # Two spellings of one directory have one name: that of the first.
            targets = {os.path.realpath(path): path for path in reversed(private.values())}
            reserved = (*(text for text in written if not _is_private(text)), *names.values())
            public = _short_names(targets.values(), base, reserved)
            for text, path in private.items():
                name = public[targets[os.path.realpath(path)]]
                names |= {text: name, path: names.get(path, name)}
        for directory in (root, base):
            names |= dict.fromkeys((os.path.abspath(directory), os.path.realpath(directory)), ".")  # noqa: PTH100
        shown = (*written, *further, *(name for parent in parents for name in (parent.ref, parent.name)))
        names |= {text: text for text in shown if text not in names and escape_invisible(text) != text}
        return cls({path: escape_invisible(name) for path, name in names.items() if path != "/"})

    def rename_text(self, text: str) -> str:
        """Return `text` with every local path renamed."""
        if not any(path in text for path in self.names):
            return text
        # The longest path comes first. A path of a single component must not follow another name.
        paths = [
            (r"(?<![\w.~-])" if path.count("/") == 1 else "") + re.escape(path)
            for path in sorted(self.names, key=len, reverse=True)
        ]
        return re.sub(f"{_URL}({'|'.join(paths)}){_END}", lambda match: self.names[match[1]], text)

    def apply(self, value: V) -> V:
        """Return `value` with every local path in its strings renamed, also in keys and in fields of models."""
        original: Any = value
        changed: Any = value
        if type(original) is str:
            changed = self.rename_text(original)
        elif isinstance(original, BaseModel):
            fields = {name: getattr(original, name) for name in type(original).model_fields}
            update = {name: new for name, old in fields.items() if (new := self.apply(old)) is not old}
            changed = original.model_copy(update=update) if update else original
        elif isinstance(original, Mapping):
            renamed = {self.apply(key): self.apply(item) for key, item in original.items()}
            changed = original if renamed == original else renamed
        elif type(original) in (list, tuple):
            items = type(original)(self.apply(item) for item in original)
            changed = original if all(new is old for new, old in zip(items, original, strict=True)) else items
        return changed  # type: ignore[no-any-return]  # has the type of ``value``

    def rename_yaml(self, text: str) -> str:
        """Return the YAML in `text` with every local path renamed, including quoted and escaped paths."""
        names = PublicNames({str(Path.home()): "~"} | dict(self.names)) if str(Path.home()) != "/" else self
        renamed, expected = names.rename_text(text), [names.apply(document) for document in parse_yaml(text, "recipe")]
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
    """Raise Refused if a file of the release called ``name`` contains an absolute path of this machine.

    Only the header of a weight file is scanned, but every byte of other files. ``directories`` are those of the project
    and of its models. The home, the working directory and the directory for temporary files are added.
    """
    private = {os.path.abspath(path) for path in directories} | {str(Path.cwd())}  # noqa: PTH100
    private |= {str(Path.home()), tempfile.gettempdir()}
    private |= {os.path.realpath(path) for path in private}
    spellings: dict[bytes, str] = {}
    for path in sorted(private - {"/"}):
        json_forms = {json.dumps(path, ensure_ascii=False)[1:-1], json.dumps(path)[1:-1]}
        json_forms |= {form.replace("/", "\\/") for form in json_forms}
        for form in {path, *json_forms, quote(path), quote(path, safe=""), html.escape(path)}:
            spellings[form.encode(errors="surrogateescape")] = path
    for file in files:
        if isinstance(file.source, Path) and file.name.endswith((_SAFETENSORS, _GGUF)):
            is_gguf = file.name.endswith(_GGUF)
            gguf_header_size = read_gguf_header(file.source).data_offset if is_gguf else 0
            with file.source.open("rb") as weights:
                header_size = gguf_header_size or int.from_bytes(weights.read(8), "little")
                content = weights.read(min(header_size, _MAX_HEADER_BYTES))
        else:
            content = file.read()
        for spelling, path in spellings.items():
            if spelling not in content:
                continue
            is_short = path.count("/") == 1
            left = rb"(?<![\w.~-])" if is_short else b""
            following = rb"(?:(?:\\?/|%2[fF])([\w.@+~ -]*))?"
            for match in re.finditer(left + re.escape(spelling) + _END.encode() + following, content):
                # /tmp and /root also occur in vocabularies and answers. So a directory with one component counts only
                # with a following name that exists in it.
                first = (match[1] or b"").decode(errors="replace").strip(". ")
                if is_short and not first:
                    continue
                is_shared = is_short or path in (str(Path.home()), tempfile.gettempdir())
                # ``first`` comes from an untrusted file.
                if first and is_shared and not os.path.lexists(os.path.join(path, first)):  # noqa: PTH118
                    continue
                leak = match[0].decode(errors="replace")
                raise Refused(
                    f"{name}: {file.name}",
                    found=f"a path of this machine: {leak}",
                    expected="only relative paths or names in published files",
                    remedy="remove the path from the recipe, the profile or the parent's file that contains it, "
                    "then run again; nothing was published",
                )


def _is_private(text: str) -> bool:
    """Return whether `text` can only mean a path of this machine."""
    return text.startswith(("/", "~", "file:"))


def _short_names(paths: Iterable[str], base: Path, reserved_names: Sequence[str]) -> dict[str, str]:
    """Return a distinct name for each path; see `PublicNames.from_recipe`."""
    names: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for path in paths:
        for start in (os.path.abspath(base), os.path.realpath(base)):  # noqa: PTH100
            if PurePosixPath(path).is_relative_to(start) and path != start:
                names[path] = os.path.relpath(path, start)
        if path not in names:
            lengths[path] = 1
    while True:
        names |= {path: "/".join(PurePosixPath(path).parts[1:][-length:]) for path, length in lengths.items()}
        counts = Counter([*names.values(), *reserved_names])
        longer = [
            path
            for path, length in lengths.items()
            if counts[names[path]] > 1 and length < len(PurePosixPath(path).parts) - 1
        ]
        if not longer:
            return names
        lengths |= {path: lengths[path] + 1 for path in longer}
