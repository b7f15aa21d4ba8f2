"""Build rounds of clients: models that others trained from the last release, merged into the next one.

A recipe of clients looks like this::

    recipe:
      merge_method: median                  # task_arithmetic (the mean), trimmed_mean, geometric_median, ...
      base_model: models/base               # of the first round; later rounds start from the last release at the target
      clients: [clients/*]                  # directories of models or adapters: patterns, or names that must exist
      samples: {clients/a: 1200}            # training samples per client; or 'samples' in a client's card; or equal
      at_least: 2                           # minimum number of clients with something new
      momentum: 0.9                         # fraction of the last round's step to repeat; or
      adam: {rate: 0.01}                    # see server_step.py
      leave_out_beyond: 5                   # see docs/methods.md

The content of the directories decides which clients take part. A client is left out and named if it does not exist, has
no complete checkpoint, has another shape, or is already part of the last release. A LoRA adapter takes
part as the model at the start of the round with the adapter applied. Its own bytes decide whether it is late, not the
model it was applied to. If nothing is new, the last round's recipe is used again, so that a scheduled run has nothing
to do. The result is a plain recipe, which is checked, released and reproduced like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.flows.candidates.last_round import (
    is_reproducible,
    last_recipe,
    optimizer_states,
    previous_base,
    used_digests,
)
from mergegate.flows.candidates.server_step import Adam, parse_adam, with_adam, with_momentum
from mergegate.merge_core import Checkpoint, open_checkpoint
from mergegate.merge_core.adapters import apply_adapter, is_adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.methods import PASSTHROUGH, TASK_ARITHMETIC, find_method
from mergegate.merge_core.parsing import read_yaml
from mergegate.merge_core.recipe import CLIENT_KEYS, expand_user_path
from mergegate.tasks.checkpoints import adapter_files_digest, checkpoint_digest, read_card
from mergegate.tasks.publish import CARD

_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class ClientRound:
    """The recipe of a round, and the clients that do not take part.

    Args:
        documents: A plain recipe that combines the clients. With momentum or Adam, a further document takes the step.
        remarks: One line for each client that is left out, and one for the model at the start of the round.
    """

    documents: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]

    @property
    def text(self) -> str:
        """The remarks as YAML comments."""
        return "".join(f"# {' '.join(remark.split())}\n" for remark in self.remarks)


@dataclass(frozen=True)
class _Client:
    """A client that can take part: its directory, the digest of its files, its sample count and its kind."""

    name: str
    digest: str
    samples: float | None
    adapter: bool

    def model(self, base: str) -> str:
        """Return the name of the client in a recipe whose round starts with ``base``."""
        return f"{base}+{self.name}" if self.adapter else self.name


def clients_document(written: Path | Mapping[str, Any], root: Path) -> tuple[Mapping[str, Any], Path] | None:
    """Return a recipe of clients and the directory of its paths, or None for any other recipe."""
    document: object = written
    directory = root
    if isinstance(written, Path):
        documents: Sequence[object] = ()
        with suppress(MergegateError, OSError, ValueError):  # reading it as a recipe reports the error
            documents = read_yaml(root / written, "a recipe in YAML")
        document, directory = documents[0] if len(documents) == 1 else None, (root / written).parent
    return (document, directory) if isinstance(document, Mapping) and "clients" in document else None


def client_round(
    document: Mapping[str, Any],
    directory: Path,
    where: str,
    *,
    released: Path | None,
    digest_of: Callable[[Path], str],
    find_state: Callable[[str], Path | None] = lambda stored: None,
) -> ClientRound:
    """Build the recipe of this round.

    Args:
        document: A recipe of clients.
        directory: Directory that its paths are relative to.
        where: Name of the recipe in messages.
        released: Checkpoint that is published now. None before the first round.
        digest_of: Function that returns the digest of a directory, such as :func:`client_digest`.
        find_state: Function that finds stored optimizer state by its location in a provenance.

    Raises:
        InvalidInput: The document is invalid.
        Refused: There are too few clients for a first round.
    """
    settings = _parse_settings(document, where)
    samples, at_least = settings.samples, settings.at_least
    base = os.path.relpath(released, directory) if released else document.get("base_model")
    if not isinstance(base, str):
        raise InvalidInput(where, found="no 'base_model'", expected="what the clients of the first round started from")
    remarks: list[str] = []
    start = _open_or_none(directory / base)
    present = []
    for name, path in _client_directories(settings.patterns, directory, remarks, f"{where}: clients"):
        try:
            adapter = _brings_adapter(path)
            _require_like(start, _adapted(start, base, name, path) if adapter else open_checkpoint(path))
            present.append(_Client(name, digest_of(path), _samples_of(name, path, samples), adapter))
        except (MergegateError, OSError) as error:
            why = f"{error.where}: {error.found}" if isinstance(error, MergegateError) else str(error.strerror)
            remarks.append(f"{name}: left out: {_without_local_path(why, path)}")
    used = used_digests(released) if released else frozenset()
    late = [client for client in present if client.digest in used]
    participants = [client for client in present if client.digest not in used]
    if released and len(participants) < at_least:
        reason = f"{len(participants)} of {len(present)} clients have something new"
        minimum = f", {at_least} are wanted" if participants else ""
        remarks_and_reason = (*remarks, f"{reason}{minimum}: the last round stands")
        if is_reproducible(released, directory, digest_of):
            return ClientRound(last_recipe(released), remarks_and_reason)
        # The recipe would now build something else, or fail.
        unchanged = {"merge_method": PASSTHROUGH.name, "models": [{"model": base}]}
        return ClientRound(
            (unchanged,), (*remarks_and_reason, "what it was made of is not all there any more, or is another")
        )
    if len(participants) < at_least:
        raise Refused(
            f"{where}: clients",
            found=f"{len(participants)} that can take part" + (f"; {remarks[0]}" if remarks else ""),
            expected=f"at least {at_least}",
            remedy="wait for them, or lower at_least",
        )
    remarks += [f"{client.name}: left out: late, it is the one that the last round was made of" for client in late]
    if released:
        remarks.append(f"the round begins with the last release, {released.name}")
    recipe = _recipe(document, base, participants, where)
    documents: tuple[Mapping[str, Any], ...] = (recipe,)
    if settings.adam:
        states = optimizer_states(released, find_state, digest_of) if released else {}
        documents = with_adam(
            recipe, {name: os.path.relpath(state, directory) for name, state in states.items()}, settings.adam
        )
        remarks += _adam_remarks(released, states)
    elif settings.momentum and released:
        if earlier_base := previous_base(released, directory, digest_of):
            remarks.append(f"{settings.momentum:g} times the last step, from {Path(earlier_base).name}, is taken again")
            documents = with_momentum(recipe, earlier_base, settings.momentum)
        else:
            remarks.append("without momentum: what the last round began with is not there any more")
    return ClientRound(documents, tuple(remarks))


def _adam_remarks(released: Path | None, states: Mapping[str, Path]) -> list[str]:
    if released is None:
        return []
    if states:
        return ["Adam goes on with what the last round has kept"]
    return ["Adam begins anew: the last round has kept nothing for it, or it is not there any more"]


def client_digest(path: Path, hashes: HashMemo) -> str:
    """Return the digest of the files of a complete checkpoint, or of an adapter alone.

    Raises:
        InvalidInput: The directory is neither.
    """
    return adapter_files_digest(path, hashes) if _brings_adapter(path) else checkpoint_digest(path, hashes)


class _ClientSettings(NamedTuple):
    """Settings of a recipe of clients."""

    patterns: list[str]
    samples: Mapping[str, float]
    at_least: int
    momentum: float
    adam: Adam | None


def _parse_settings(document: Mapping[str, Any], where: str) -> _ClientSettings:
    defaults: tuple[object, ...] = ((), {}, 1, 0, None)
    patterns, samples, at_least, momentum, adam = map(document.get, CLIENT_KEYS, defaults)
    if (
        not isinstance(patterns, list)
        or not patterns
        or not all(isinstance(value, str) and value for value in patterns)
    ):
        raise InvalidInput(f"{where}: clients", found=f"{patterns!r:.60}", expected="a list of directories or patterns")
    is_valid = isinstance(samples, Mapping) and all(_is_count(value) for value in samples.values())
    if not is_valid:
        raise InvalidInput(f"{where}: samples", found=f"{samples!r:.60}", expected="a number above 0 for each client")
    if type(at_least) is not int or at_least < 1:
        raise InvalidInput(f"{where}: at_least", found=f"{at_least!r:.60}", expected="a whole number from 1")
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise InvalidInput(f"{where}: momentum", found=f"{momentum!r:.60}", expected="a number from 0, below 1")
    if wrong := next((key for key in ("models", "slices", "modules") if key in document), None):
        raise InvalidInput(f"{where}: {wrong}", found="beside clients", expected="either: clients are the models")
    settings = parse_adam(adam, f"{where}: adam")
    if settings and momentum:
        raise InvalidInput(f"{where}: adam", found="beside momentum", expected="either: Adam has a momentum, beta1")
    return _ClientSettings(patterns, samples, at_least, float(momentum), settings)


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _client_directories(
    patterns: Sequence[str], directory: Path, remarks: list[str], where: str
) -> Iterator[tuple[str, Path]]:
    """Yield each client once, with its name. Add a remark for each named client that does not exist."""
    seen: set[Path] = set()
    for pattern in patterns:
        is_name = not _PATTERN & set(pattern)
        try:
            path = expand_user_path(pattern)
            start = Path(path.anchor) if path.is_absolute() else directory
            candidates = [directory / path] if is_name else sorted(start.glob(str(path.relative_to(path.anchor))))
            directories = [candidate for candidate in candidates if candidate.is_dir()]
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                where,
                found=f"{pattern!r:.60}, which no directory can match: {error}",
                expected="directories, or patterns",
            ) from None
        if not directories:
            remarks.append(f"{pattern}: left out: " + ("not there" if is_name else "nothing is there"))
        for candidate in directories:
            if candidate.resolve() not in seen:
                seen.add(candidate.resolve())
                yield os.path.relpath(candidate, directory), candidate


def _without_local_path(message: str, path: Path) -> str:
    """Remove the local path of a client from a message, because a release shows the message to others."""
    for prefix in (path, path.absolute(), path.resolve()):
        message = message.replace(f"{prefix}/", "").replace(str(prefix), "its directory")
    return message


def _open_or_none(path: Path) -> Checkpoint | None:
    """Open the base, or return None. Checking the recipe reports the error."""
    with suppress(MergegateError):
        return open_checkpoint(path)
    return None


def _brings_adapter(path: Path) -> bool:
    """Return whether a client is an adapter. A directory with a configuration file is always a model."""
    return is_adapter(path) and not (path / "config.json").exists()


def _adapted(start: Checkpoint | None, base: str, name: str, path: Path) -> Checkpoint | None:
    """Apply the adapter of a client to the model at the start of the round. None if that cannot be opened.

    Raises:
        InvalidInput: The adapter cannot be applied, or a recipe cannot name it.
    """
    if "+" in base:
        raise InvalidInput(f"base_model {base}", found="a base with an adapter", expected="a model that takes another")
    if "@" in name or "+" in name:
        raise InvalidInput(name, found="an adapter with @ or + in its name", expected="a name that a recipe can have")
    adapter = open_adapter(path)
    return apply_adapter(start, adapter) if start else None


def _require_like(base: Checkpoint | None, client: Checkpoint | None) -> None:
    """Raise InvalidInput unless the client has the tensors of the base, in their shapes."""
    for name, tensor in base.tensors.items() if base and client else ():
        assert client is not None
        actual = client.tensors.get(name)
        if actual is None or actual.shape != tensor.shape:
            found = "missing" if actual is None else f"shape {list(actual.shape)}"
            raise InvalidInput(name, found=found, expected=f"shape {list(tensor.shape)}, as in the base")


def _samples_of(name: str, path: Path, declared: Mapping[str, float]) -> float | None:
    if name in declared:
        return float(declared[name])
    card = read_card(path)
    if card.problem and "samples" not in card.metadata:
        raise InvalidInput(f"{name}: {CARD}", found=card.problem, expected="a model card whose front matter is YAML")
    value = card.metadata.get("samples")
    if value is not None and not _is_count(value):
        raise InvalidInput(f"{CARD}: samples", found=f"{value!r:.60}", expected="a number above 0")
    return None if value is None else float(value)  # type: ignore[arg-type]  # _is_count


def _recipe(document: Mapping[str, Any], base: str, clients: Sequence[_Client], where: str) -> dict[str, Any]:
    plain = {key: value for key, value in document.items() if key not in CLIENT_KEYS}
    name = plain.setdefault("merge_method", TASK_ARITHMETIC.name)
    method = find_method(name, f"{where}: merge_method")
    counted_clients = [client for client in clients if client.samples is not None]
    if counted_clients and len(counted_clients) < len(clients):
        lacking = next(client.name for client in clients if client.samples is None)
        raise InvalidInput(
            f"{where}: samples", found=f"none of {lacking}", expected="of each client, or of none: others have some"
        )
    weighted = method.parameter("weight") is not None
    if counted_clients and not weighted:
        raise InvalidInput(
            f"{where}: samples",
            found=f"{method.name}, for which all clients count alike",
            expected="a method with weights",
            remedy="take task_arithmetic or geometric_median, or leave samples out",
        )
    models = []
    for client in clients:
        weight = {"parameters": {"weight": client.samples or 1.0}} if weighted else {}
        models.append({"model": client.model(base), **weight})
    shared = plain.get("parameters") or {}
    if method.parameter("normalize") is not None and isinstance(shared, Mapping):
        plain["parameters"] = {"normalize": True, **shared}
    return {**plain, "base_model": base, "models": models}
