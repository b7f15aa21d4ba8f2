"""Build the recipe of a round: merge models that clients trained from the last release into the next one.

A recipe of clients looks like this::

    recipe:
      merge_method: median                  # task_arithmetic (the mean), trimmed_mean, geometric_median, ...
      base_model: models/base               # of the first round; later rounds start from the last release at the target
      clients: [clients/*]                  # directories of models or adapters: patterns, or names that must exist
      samples: {clients/a: 1200}            # training samples per client; or 'samples' in a client's card; or equal
      at_least: 2                           # minimum number of clients with something new
      leave_out_beyond: 5                   # see docs/how-to/merge-client-rounds.md

The content of the directories decides which clients take part. mergegate leaves out a client, and says why, if it does
not exist, has no complete checkpoint, has tensors of another shape, or is already part of the last release. A LoRA
adapter is applied to the model at the start of the round. Only the adapter's own files decide whether it is already
part of the last release. If nothing is new, the recipe of the last round is used again, so that a scheduled run has
nothing to do. The result is a plain recipe, which is checked, released and reproduced like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.flows.candidates.run_expansion import ExpandedRecipe, is_pattern, matching_directories
from mergegate.merge_core import Checkpoint, open_checkpoint
from mergegate.merge_core.adapters import apply_adapter, is_adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.methods import PASSTHROUGH, TASK_ARITHMETIC, find_method
from mergegate.merge_core.parsing import read_plain, read_yaml
from mergegate.merge_core.recipe import CLIENT_KEYS, expand_user_path, parse_reference
from mergegate.tasks.models.checkpoints import adapter_files_digest, checkpoint_digest, files_digest, read_card


@dataclass(frozen=True)
class _Client:
    """A client that can take part."""

    name: str
    digest: str
    samples: float | None
    adapter: bool

    def model(self, base: str) -> str:
        """Return the client as a recipe names it: an adapter is applied to ``base``."""
        return f"{base}+{self.name}" if self.adapter else self.name


def client_round(
    document: Mapping[str, Any],
    directory: Path,
    location: str,
    *,
    last_release: Path | None,
    digest_of: Callable[[Path], str],
) -> ExpandedRecipe:
    """Build the recipe of this round: a plain recipe that combines the clients.

    The remarks name the clients that are left out, and the model at the start of the round.

    Args:
        document: A recipe of clients.
        directory: Directory that its paths are relative to.
        location: Name of the recipe in messages.
        last_release: Checkpoint that is published now. None before the first round.
        digest_of: Function that returns the digest of a directory, such as :func:`client_digest`.

    Raises:
        InvalidInput: The document is invalid.
        Refused: There are too few clients for a first round.
    """
    patterns, samples, at_least = _parse_settings(document, location)
    base = os.path.relpath(last_release, directory) if last_release else document.get("base_model")
    if not isinstance(base, str):
        raise InvalidInput(
            location, found="no 'base_model'", expected="the model that the clients of the first round started from"
        )
    remarks: list[str] = []
    start: Checkpoint | None = None  # checking the recipe reports a base that cannot be opened
    with suppress(MergegateError):
        start = open_checkpoint(directory / base)
    present = []
    for name, path in _client_directories(patterns, directory, remarks, f"{location}: clients"):
        try:
            _require_same_shapes(start, name, path, base)
            digest = digest_of(path)
            count: Any = samples.get(name)
            if count is None:
                from mergegate.tasks.release.publish import (
                    CARD,  # Imported late, because most commands need no publication.
                )

                card = read_card(path)
                if card.problem and "samples" not in card.metadata:
                    expected = "a model card whose front matter is YAML"
                    raise InvalidInput(f"{name}: {CARD}", found=card.problem, expected=expected)
                if (count := card.metadata.get("samples")) is not None and not _is_count(count):
                    raise InvalidInput(f"{CARD}: samples", found=f"{count!r:.60}", expected="a number above 0")
            present.append(
                _Client(name, digest, None if count is None else float(count), adapter=_brings_adapter(path))
            )
        except (MergegateError, OSError) as error:
            reason = f"{error.where}: {error.found}" if isinstance(error, MergegateError) else str(error.strerror)
            for prefix in (path, path.absolute(), path.resolve()):  # a release shows the remark to others
                reason = reason.replace(f"{prefix}/", "").replace(str(prefix), "its directory")
            remarks.append(f"{name}: left out: {reason}")
    used = used_digests(last_release) if last_release else frozenset()
    late = [client for client in present if client.digest in used]
    participants = [client for client in present if client.digest not in used]
    if last_release and len(participants) < at_least:
        reason = f"{len(participants)} of {len(present)} clients have a new model"
        minimum = f", at least {at_least} required" if participants else ""
        remarks_and_reason = (*remarks, f"{reason}{minimum}: the last round is used again")
        if is_reproducible(last_release, directory, digest_of):
            return ExpandedRecipe(last_recipe(last_release), remarks_and_reason)
        # Repeating the last recipe would now build something else, or fail.
        unchanged = {"merge_method": PASSTHROUGH.name, "models": [{"model": base}]}
        return ExpandedRecipe((unchanged,), (*remarks_and_reason, "some of its models no longer exist or have changed"))
    if len(participants) < at_least:
        raise Refused(
            f"{location}: clients",
            found=f"{len(participants)} can take part" + (f"; {remarks[0]}" if remarks else ""),
            expected=f"at least {at_least}",
            remedy="wait for more clients, or lower at_least",
        )
    remarks += [f"{client.name}: left out: the last round already includes this model" for client in late]
    if last_release:
        remarks.append(f"the round starts from the last release, {last_release.name}")
    return ExpandedRecipe((_recipe(document, base, participants, location),), tuple(remarks))


def client_digest(path: Path, hashes: HashMemo) -> str:
    """Return the digest of a client's files, which are a complete checkpoint or an adapter."""
    return adapter_files_digest(path, hashes) if _brings_adapter(path) else checkpoint_digest(path, hashes)


def _parse_settings(document: Mapping[str, Any], location: str) -> tuple[list[str], Mapping[str, float], int]:
    """Return the patterns of directories, the samples by client, and the minimum number of clients."""
    defaults: tuple[object, ...] = ((), {}, 1)
    patterns, samples, at_least = map(document.get, CLIENT_KEYS, defaults)
    if (
        not isinstance(patterns, list)
        or not patterns
        or not all(isinstance(value, str) and value for value in patterns)
    ):
        raise InvalidInput(
            f"{location}: clients", found=f"{patterns!r:.60}", expected="a list of directories or patterns"
        )
    is_valid = isinstance(samples, Mapping) and all(_is_count(value) for value in samples.values())
    if not is_valid:
        raise InvalidInput(
            f"{location}: samples", found=f"{samples!r:.60}", expected="a number above 0 for each client"
        )
    if type(at_least) is not int or at_least < 1:
        raise InvalidInput(f"{location}: at_least", found=f"{at_least!r:.60}", expected="a whole number from 1")
    if wrong := next((key for key in ("models", "slices", "modules") if key in document), None):
        raise InvalidInput(
            f"{location}: {wrong}",
            found="it cannot be combined with clients",
            expected="only one of them, because the clients are the models",
        )
    return patterns, samples, at_least


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _client_directories(
    patterns: Sequence[str], directory: Path, remarks: list[str], location: str
) -> Iterator[tuple[str, Path]]:
    """Yield each client once, with its name. Add a remark for each named client that does not exist."""
    seen: set[Path] = set()
    for pattern in patterns:
        directories = matching_directories(pattern, directory, location)
        if not directories:
            reason = "no directory matches" if is_pattern(pattern) else "it does not exist"
            remarks.append(f"{pattern}: left out: {reason}")
        for candidate in directories:
            if candidate.resolve() not in seen:
                seen.add(candidate.resolve())
                yield os.path.relpath(candidate, directory), candidate


def _brings_adapter(path: Path) -> bool:
    """Return whether a client is an adapter. A directory with ``config.json`` is always a model."""
    return is_adapter(path) and not (path / "config.json").exists()


def _require_same_shapes(start: Checkpoint | None, name: str, path: Path, base: str) -> None:
    """Raise InvalidInput unless a client has all tensors of the model at the start of the round, in the same shapes.

    An adapter is first applied to that model. If the model cannot be opened (``start`` is None), only check the client.
    """
    client: Checkpoint | None
    if _brings_adapter(path):
        if "+" in base:
            raise InvalidInput(
                f"base_model {base}", found="a base with an adapter", expected="a base without an adapter"
            )
        if "@" in name or "+" in name:
            raise InvalidInput(
                name, found="an adapter with @ or + in its name", expected="a name without these characters"
            )
        adapter = open_adapter(path)
        client = apply_adapter(start, adapter) if start else None
    else:
        client = open_checkpoint(path)
    for tensor_name, tensor in start.tensors.items() if start and client else ():
        assert client is not None
        actual = client.tensors.get(tensor_name)
        if actual is None or actual.shape != tensor.shape:
            found = "missing" if actual is None else f"shape {list(actual.shape)}"
            raise InvalidInput(tensor_name, found=found, expected=f"shape {list(tensor.shape)}, as in the base")


def _recipe(document: Mapping[str, Any], base: str, clients: Sequence[_Client], location: str) -> dict[str, Any]:
    plain = {key: value for key, value in document.items() if key not in CLIENT_KEYS}
    name = plain.setdefault("merge_method", TASK_ARITHMETIC.name)
    method = find_method(name, f"{location}: merge_method")
    counted_clients = [client for client in clients if client.samples is not None]
    if counted_clients and len(counted_clients) < len(clients):
        lacking = next(client.name for client in clients if client.samples is None)
        raise InvalidInput(
            f"{location}: samples",
            found=f"no sample count of {lacking}",
            expected="sample counts of all clients or of none",
        )
    weighted = method.parameter("weight") is not None
    if counted_clients and not weighted:
        raise InvalidInput(
            f"{location}: samples",
            found=f"{method.name}, which weights all clients equally",
            expected="a method with weights",
            remedy="use task_arithmetic or geometric_median, or omit samples",
        )
    models = []
    for client in clients:
        weight = {"parameters": {"weight": client.samples or 1.0}} if weighted else {}
        models.append({"model": client.model(base), **weight})
    shared = plain.get("parameters") or {}
    if method.parameter("normalize") is not None and isinstance(shared, Mapping):
        plain["parameters"] = {"normalize": True, **shared}
    return {**plain, "base_model": base, "models": models}


def used_digests(last_release: Path) -> frozenset[str]:
    """Return the digests of a release's parents (including clients that the merge left out) and of their adapters."""
    try:
        parents = _parents_of(last_release)
        adapters = [
            parent["annotations"]["adapter"]["files"]
            for parent in parents
            if "adapter" in parent.get("annotations", {})
        ]
        return frozenset((*(str(parent["digest"]["sha256"]) for parent in parents), *map(files_digest, adapters)))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError):
        return frozenset()


def last_recipe(last_release: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the documents of a release's recipe."""
    from mergegate.tasks.release.publish import RECIPE  # Imported late, because 'mergegate merge' needs no publication.

    documents = read_yaml(last_release / RECIPE, "the recipe of the last release")
    mappings = tuple(document for document in documents if isinstance(document, Mapping))
    if not mappings or len(mappings) < len(documents):
        raise InvalidInput(str(last_release / RECIPE), found=f"{documents!r:.60}", expected="the recipe of a release")
    return mappings


def is_reproducible(last_release: Path, directory: Path, digest_of: Callable[[Path], str]) -> bool:
    """Return whether all parents of a release still exist unchanged.

    Models on the Hub count as unchanged. A release without readable provenance counts as reproducible.
    """
    from mergegate.tasks.release.publish import PROVENANCE

    def is_unchanged(parent: Mapping[str, Any]) -> bool:
        notes, digest = parent.get("annotations", {}), parent["digest"]
        adapter, reference = notes.get("adapter"), parse_reference(parent["name"], PROVENANCE)
        if notes.get("role") == "text" or (adapter or digest).get("gitCommit"):
            return True
        path, expected_digest = reference.path, digest["sha256"]
        if adapter:  # the model it is applied to is a parent of its own
            path, expected_digest = str(reference.adapter), files_digest(adapter["files"])
        return (directory / expand_user_path(path)).is_dir() and digest_of(
            directory / expand_user_path(path)
        ) == expected_digest

    try:
        parents = _parents_of(last_release)
    except (OSError, MergegateError, KeyError, TypeError):
        return True
    try:
        return all(map(is_unchanged, parents))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError, ValueError):
        return False


def _parents_of(last_release: Path) -> Any:
    """Return the models that a release was built from, as its provenance lists them."""
    from mergegate.tasks.release.publish import PROVENANCE, read_document

    document = read_document(read_plain(last_release / PROVENANCE, 64 << 20), PROVENANCE)
    return document["predicate"]["buildDefinition"]["resolvedDependencies"]
