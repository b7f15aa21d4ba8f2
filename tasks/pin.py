"""Pinning: from the names in a recipe to bytes that cannot change under the run.

Two steps, because the cheap refusals come between them. ``find_parents`` turns each reference into a directory and, for
the Hub, a commit; licences and headers are checked on that. ``pin`` then hashes the files that matter (each once, see
``merge_core.hashing``) into the digest that every key speaks of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core import CheckpointRef, Recipe, resolve_local
from merge_core.errors import InvalidInput
from merge_core.hashing import HashMemo
from merge_core.keys import NotInKey, merkle
from tasks.model import Model

# What decides a checkpoint's behaviour: weights, configuration, tokenizer, templates, custom code. Cards and licences
# are read by the licence check, which hashes them itself.
MATTERS = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")


class Found(BaseModel):
    """A parent of the merge, found but not yet read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # unique in the run
    ref: str  # as the recipe writes it
    directory: Annotated[Path, NotInKey]
    revision: str | None = None  # commit of a Hub repository; None for a local directory
    is_base: bool = False


class Parent(Model):
    """A parent of the merge, pinned. Only its digest is in a key: a parent is evaluated once, under any name."""

    ref: Annotated[str, NotInKey]  # the merge engine knows it by this
    revision: Annotated[str | None, NotInKey] = None
    is_base: Annotated[bool, NotInKey] = False


@dataclass(frozen=True)
class PinnedRecipe:
    """A recipe whose identity speaks of its parents' content, not of their names or places."""

    recipe: Recipe
    parents: tuple[Parent, ...]

    def content_key(self) -> object:
        return _substitute(self.recipe.canonical(), {parent.ref: parent.digest for parent in self.parents})


def find_parents(recipe: Recipe) -> tuple[Found, ...]:
    """Every checkpoint that the recipe names, in its order; local ones relative to the recipe's directory.

    Raises:
        InvalidInput: for a reference that is neither a local directory nor a repository that can be reached.
    """
    references = recipe.references()
    names = _unique_names(references)
    found = []
    for reference, name in zip(references, names, strict=True):
        directory, revision = _locate(reference, recipe.directory)
        found.append(
            Found(
                name=name,
                ref=str(reference),
                directory=directory,
                revision=revision,
                is_base=recipe.base is not None and str(reference) == str(recipe.base),
            )
        )
    return tuple(found)


def pin(found: Sequence[Found], hashes: HashMemo) -> tuple[Parent, ...]:
    """The same parents with the digest of their files that matter."""
    return tuple(Parent(**parent.model_dump(), digest=checkpoint_digest(parent.directory, hashes)) for parent in found)


def checkpoint_digest(directory: Path, hashes: HashMemo) -> str:
    """Merkle digest over (name, size, sha256) of the files of a checkpoint that matter.

    Raises:
        InvalidInput: for a directory without any such file.
    """
    files = {
        path.name: (path.stat().st_size, hashes.sha256(path))
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in MATTERS and not path.name.startswith(".")
    }
    if not files:
        raise InvalidInput(str(directory), found="no checkpoint files", expected="weights, config.json and a tokenizer")
    return merkle(files)


def _locate(reference: CheckpointRef, root: Path | None) -> tuple[Path, str | None]:
    local = resolve_local(reference, root)
    return (local.resolve(), None) if local is not None else _download(reference)


def _download(reference: CheckpointRef) -> tuple[Path, str]:
    """Snapshot of a Hub repository at the commit that its revision means now."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # httpx or httpx2, as the library's version has it
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    try:
        commit = HfApi().model_info(reference.path, revision=reference.revision).sha
        if commit is None:
            raise InvalidInput(str(reference), found="a repository without commits")
        return Path(snapshot_download(reference.path, revision=commit)), commit
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise InvalidInput(
            str(reference),
            found=f"neither a directory here nor a repository that can be reached ({type(error).__name__})",
            expected="a path relative to the recipe, or org/name on the Hub",
            remedy="check the spelling, the network, and HF_TOKEN for a private or gated repository",
        ) from error


def _substitute(value: object, digests: Mapping[str, str]) -> object:
    """``value`` with every string that is a reference replaced by the digest it stands for."""
    if isinstance(value, str):
        return digests.get(value, value)
    if isinstance(value, Mapping):
        return {digests.get(key, key): _substitute(inner, digests) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(inner, digests) for inner in value]
    return value


def _unique_names(references: Sequence[CheckpointRef]) -> list[str]:
    """Last path components where they tell the references apart, whole references where they do not."""
    counts = Counter(reference.name for reference in references)
    return [reference.name if counts[reference.name] == 1 else str(reference) for reference in references]
