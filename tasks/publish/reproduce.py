"""Make the weights of a release again, from its recipe and its parents alone, and compare them to the byte.

The release holds no paths of the machine that made it. A parent on the Hub is fetched at the commit that the provenance
names; a local one is looked for where the recipe says, beside a recipe file with the same content below the working
directory, and is believed only when its digest is the one in the provenance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_core import CheckpointRef, load_recipe, open_checkpoint, plan_merge, resolve_local
from merge_core import merge as merge_weights
from merge_core.errors import InvalidInput, Refused
from merge_core.hashing import HashMemo
from tasks.hub.access import HubAccess, said
from tasks.pin import checkpoint_digest
from tasks.publish.content import RECIPE
from tasks.publish.standing import Standing
from tasks.publish.sums import sha256_of
from tasks.publish.verify import Verified
from tasks.versions import versions

_WEIGHTS = ".safetensors"
_DECIDES = ("torch", "numba")  # the last place of a number, besides recipe and parents
_NOT_SEARCHED = frozenset({"node_modules", "site-packages", "__pycache__"})
_RECIPES = (".yaml", ".yml")


@dataclass(frozen=True)
class Reproduced:
    """A release that was made again, byte for byte."""

    where: str
    files: tuple[str, ...]  # that were made again and are equal
    bytes: int
    seconds: float


def reproduce(
    release: Standing,
    verified: Verified,
    out: Path,
    hashes: HashMemo,
    *,
    access: Callable[[], HubAccess],
    directory: Path | None = None,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> Reproduced:
    """Merge again into ``out``, an empty directory, and compare every file with that of the release.

    Args:
        verified: What ``verify`` said of the release: only what agrees with itself is worth making again.
        access: How to reach the Hub, asked when a parent lies there.
        directory: What relative paths of the recipe are relative to; None: looked for.

    Raises:
        InvalidInput: when a parent is not to be found, or is not the one of the provenance any more.
        Refused: when what comes out is not what was released.
    """
    build: Mapping[str, Any] = verified.statement["predicate"]["buildDefinition"]
    text = release.read(RECIPE)
    recipe = load_recipe(text.decode(), where=f"{release.where}: {RECIPE}")
    digests = {parent["name"]: parent["digest"] for parent in build["resolvedDependencies"]}
    starts = [directory] if directory else [*_beside_same(text), Path.cwd()]
    parents = _parents(recipe.references(), digests, starts, hashes, access)
    plan = plan_merge(recipe, {ref: open_checkpoint(place) for ref, place in parents.items()})
    record = merge_weights(plan, out, seed=build["externalParameters"]["seed"], device=device, on_progress=on_progress)
    made = {
        path.relative_to(out).as_posix(): (path.stat().st_size, hashes.sha256(path, trust=False))
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    _require_equal(release, made, build.get("internalParameters", {}).get("versions", {}))
    return Reproduced(release.where, tuple(made), sum(size for size, _ in made.values()), record.seconds)


def _require_equal(release: Standing, made: Mapping[str, tuple[int, str]], made_with: Mapping[str, str]) -> None:
    released = release.files()
    weights = {name for name in released if name.endswith(_WEIGHTS)}
    other = sorted(name for name in weights | set(made) if made.get(name) != released.get(name))
    if not other:
        return
    here = versions(*_DECIDES)
    moved = [
        f"{name} {made_with[name]} (here {here[name]})"
        for name in _DECIDES
        if made_with.get(name, here[name]) != here[name]
    ]
    raise Refused(
        f"{release.where}: {other[0]}",
        found=f"made again, {len(other)} of {len(weights | set(made))} files are others: {', '.join(other[:5])}",
        expected="the same bytes",
        remedy=f"it was made with {', '.join(moved)}: use those versions"
        if moved
        else "if it was made on another kind of device, use that one (--device): the last place may differ",
    )


def _parents(
    references: Sequence[CheckpointRef],
    digests: Mapping[str, Mapping[str, str]],
    starts: Sequence[Path],
    hashes: HashMemo,
    access: Callable[[], HubAccess],
) -> dict[str, Path]:
    """The directory of every parent, by its name in the recipe, each compared with the provenance."""
    found: dict[str, Path] = {}
    for reference in references:
        name = str(reference)
        digest = digests.get(name)
        if digest is None:
            raise InvalidInput(name, found="the provenance does not name it", expected="every parent of the recipe")
        if commit := digest.get("gitCommit"):
            places: Iterator[Path] = iter([_download(reference.path, commit, access())])
        else:
            places = _local(reference, starts)
        seen = None
        for place in places:
            if (seen := checkpoint_digest(place, hashes)) == digest["mergegateCheckpoint"]:
                found[name] = place
                break
        else:
            raise InvalidInput(
                name,
                found=f"its content is {seen[:16]} now" if seen else "not found below the working directory",
                expected=f"the checkpoint {digest['mergegateCheckpoint'][:16]} that was merged",
                remedy="say with --parents what the recipe's paths are relative to, and bring back what was merged",
            )
    return found


def _local(reference: CheckpointRef, starts: Sequence[Path]) -> Iterator[Path]:
    for start in starts:
        try:
            place = resolve_local(reference, start)
        except InvalidInput:
            continue
        if place is not None:
            yield place


def _beside_same(recipe: bytes) -> Iterator[Path]:
    """Directories below the working directory that hold a recipe with this very content, releases left out."""
    for top, folders, names in os.walk(Path.cwd()):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _NOT_SEARCHED)
        place = Path(top)
        for name in sorted(names):
            file = place / name
            if name == RECIPE or not name.endswith(_RECIPES) or file.stat().st_size != len(recipe):
                continue
            if sha256_of(file.read_bytes()) == sha256_of(recipe):
                yield place


def _download(repo: str, commit: str, access: HubAccess) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=commit, token=access.token or False, endpoint=access.endpoint))
    except Exception as error:
        raise InvalidInput(
            f"{repo}@{commit[:12]}",
            found=f"cannot be had from the Hub: {said(error, access)}",
            expected="the parent that was merged",
            remedy="check the network, and HF_TOKEN for a private or gated repository",
        ) from None
