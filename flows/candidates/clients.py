"""Rounds of clients: models that others have trained from the last release, merged into the next.

    recipe:
      merge_method: median                  # task_arithmetic (the mean), trimmed_mean, geometric_median, ...
      base_model: models/base               # of the first round; then the last release at the target
      clients: [clients/*]                  # directories: patterns, or names that must be there; models or adapters
      samples: {clients/a: 1200}            # how much each has seen; else 'samples' in a client's card; else all alike
      at_least: 2                           # clients with something new, for a round to take place
      momentum: 0.9                         # how much of the last round's step is taken again; or
      adam: {rate: 0.01}                    # see server_step.py
      leave_out_beyond: 5                   # see docs/methods.md

Who takes part is decided by what lies there: a client that is not there, has no whole checkpoint, is of another shape,
or is the very one that the last release was made of, is left out and named. A LoRA adapter takes part as the model that
the round begins with, with the adapter on it; it is late by its own bytes, whatever it was applied to. Where nothing is
new the last round's recipe stands, so that a night makes nothing. What comes out is a plain recipe: it is what is
checked, released and made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.flows.candidates.last_round import begun_with, counted, is_as_made, kept_states, last_recipe
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
    """The recipe of a round, and who does not take part.

    Args:
        documents: A plain recipe: what the clients make together; after it, with momentum or Adam, the step that is
            taken.
        remarks: A line for each client that is left out, and for what the round begins with.
    """

    documents: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]

    @property
    def text(self) -> str:
        """The remarks as comments of YAML."""
        return "".join(f"# {' '.join(remark.split())}\n" for remark in self.remarks)


@dataclass(frozen=True)
class _Client:
    """A client that can take part: its directory, digest of its files, how much it has seen, what it brings."""

    name: str
    digest: str
    samples: float | None
    adapter: bool

    def model(self, base: str) -> str:
        """As a recipe names it whose round begins with ``base``."""
        return f"{base}+{self.name}" if self.adapter else self.name


def clients_document(written: Path | Mapping[str, Any], root: Path) -> tuple[Mapping[str, Any], Path] | None:
    """A recipe of clients and the directory of its paths; None for any other recipe."""
    found: object = written
    directory = root
    if isinstance(written, Path):
        documents: Sequence[object] = ()
        with suppress(MergegateError, OSError, ValueError):  # whoever reads it as a recipe says what is wrong with it
            documents = read_yaml(root / written, "a recipe in YAML")
        found, directory = documents[0] if len(documents) == 1 else None, (root / written).parent
    return (found, directory) if isinstance(found, Mapping) and "clients" in found else None


def client_round(
    document: Mapping[str, Any],
    directory: Path,
    where: str,
    *,
    released: Path | None,
    digest_of: Callable[[Path], str],
    kept_place: Callable[[str], Path | None] = lambda stored: None,
) -> ClientRound:
    """Tonight's round.

    Args:
        document: A recipe of clients.
        directory: What its paths are relative to.
        where: What messages call it.
        released: The checkpoint that is published now; None before the first round.
        digest_of: Digest of what lies in a directory, as of :func:`client_digest`.
        kept_place: Where something lies that an optimizer has kept, by what a provenance calls its place.

    Raises:
        InvalidInput: The document says something that has no meaning.
        Refused: There are too few clients for a first round.
    """
    said = _said(document, where)
    samples, at_least = said.samples, said.at_least
    base = os.path.relpath(released, directory) if released else document.get("base_model")
    if not isinstance(base, str):
        raise InvalidInput(where, found="no 'base_model'", expected="what the clients of the first round started from")
    remarks: list[str] = []
    begun = _opened(directory / base)
    present = []
    for name, place in _places(said.patterns, directory, remarks, f"{where}: clients"):
        try:
            adapter = _brings_adapter(place)
            _require_like(begun, _adapted(begun, base, name, place) if adapter else open_checkpoint(place))
            present.append(_Client(name, digest_of(place), _samples_of(name, place, samples), adapter))
        except (MergegateError, OSError) as error:
            why = f"{error.where}: {error.found}" if isinstance(error, MergegateError) else str(error.strerror)
            remarks.append(f"{name}: left out: {_without_place(why, place)}")
    used = counted(released) if released else frozenset()
    late = [client for client in present if client.digest in used]
    taking = [client for client in present if client.digest not in used]
    if released and len(taking) < at_least:
        few = f"{len(taking)} of {len(present)} clients have something new"
        wanted = f", {at_least} are wanted" if taking else ""
        stands = (*remarks, f"{few}{wanted}: the last round stands")
        if is_as_made(released, directory, digest_of):
            return ClientRound(last_recipe(released), stands)
        # Its recipe would make something else by now, or nothing.
        itself = {"merge_method": PASSTHROUGH.name, "models": [{"model": base}]}
        return ClientRound((itself,), (*stands, "what it was made of is not all there any more, or is another"))
    if len(taking) < at_least:
        raise Refused(
            f"{where}: clients",
            found=f"{len(taking)} that can take part" + (f"; {remarks[0]}" if remarks else ""),
            expected=f"at least {at_least}",
            remedy="wait for them, or lower at_least",
        )
    remarks += [f"{client.name}: left out: late, it is the one that the last round was made of" for client in late]
    if released:
        remarks.append(f"the round begins with the last release, {released.name}")
    made = _recipe(document, base, taking, where)
    documents: tuple[Mapping[str, Any], ...] = (made,)
    if said.adam:
        kept = kept_states(released, kept_place, digest_of) if released else {}
        documents = with_adam(made, {name: os.path.relpath(one, directory) for name, one in kept.items()}, said.adam)
        remarks += _on_adam(released, kept)
    elif said.momentum and released:
        if before := begun_with(released, directory, digest_of):
            remarks.append(f"{said.momentum:g} times the last step, from {Path(before).name}, is taken again")
            documents = with_momentum(made, before, said.momentum)
        else:
            remarks.append("without momentum: what the last round began with is not there any more")
    return ClientRound(documents, tuple(remarks))


def _on_adam(released: Path | None, kept: Mapping[str, Path]) -> list[str]:
    if released is None:
        return []
    if kept:
        return ["Adam goes on with what the last round has kept"]
    return ["Adam begins anew: the last round has kept nothing for it, or it is not there any more"]


def client_digest(place: Path, hashes: HashMemo) -> str:
    """Digest of the files of a whole checkpoint, or of an adapter alone.

    Raises:
        InvalidInput: For a directory that is neither.
    """
    return adapter_files_digest(place, hashes) if _brings_adapter(place) else checkpoint_digest(place, hashes)


class _Said(NamedTuple):
    """What a recipe says of clients."""

    patterns: list[str]
    samples: Mapping[str, float]
    at_least: int
    momentum: float
    adam: Adam | None


def _said(document: Mapping[str, Any], where: str) -> _Said:
    usual: tuple[object, ...] = ((), {}, 1, 0, None)
    patterns, samples, at_least, momentum, adam = map(document.get, CLIENT_KEYS, usual)
    if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise InvalidInput(f"{where}: clients", found=f"{patterns!r:.60}", expected="a list of directories or patterns")
    sound = isinstance(samples, Mapping) and all(_is_count(one) for one in samples.values())
    if not sound:
        raise InvalidInput(f"{where}: samples", found=f"{samples!r:.60}", expected="a number above 0 for each client")
    if type(at_least) is not int or at_least < 1:
        raise InvalidInput(f"{where}: at_least", found=f"{at_least!r:.60}", expected="a whole number from 1")
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise InvalidInput(f"{where}: momentum", found=f"{momentum!r:.60}", expected="a number from 0, below 1")
    if wrong := next((key for key in ("models", "slices", "modules") if key in document), None):
        raise InvalidInput(f"{where}: {wrong}", found="beside clients", expected="either: clients are the models")
    taken = parse_adam(adam, f"{where}: adam")
    if taken and momentum:
        raise InvalidInput(f"{where}: adam", found="beside momentum", expected="either: Adam has a momentum, beta1")
    return _Said(patterns, samples, at_least, float(momentum), taken)


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _places(patterns: Sequence[str], directory: Path, remarks: list[str], where: str) -> Iterator[tuple[str, Path]]:
    """Each client once, by its name; those that are named and not there are remarked."""
    seen: set[Path] = set()
    for pattern in patterns:
        named = not _PATTERN & set(pattern)
        try:
            path = expand_user_path(pattern)
            start = Path(path.anchor) if path.is_absolute() else directory
            found = [directory / path] if named else sorted(start.glob(str(path.relative_to(path.anchor))))
            places = [place for place in found if place.is_dir()]
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                where,
                found=f"{pattern!r:.60}, which no directory can match: {error}",
                expected="directories, or patterns",
            ) from None
        if not places:
            remarks.append(f"{pattern}: left out: " + ("not there" if named else "nothing is there"))
        for place in places:
            if place.resolve() not in seen:
                seen.add(place.resolve())
                yield os.path.relpath(place, directory), place


def _without_place(said: str, place: Path) -> str:
    """What is said of a client without where it lies on this machine: a release tells it to strangers."""
    for known in (place, place.absolute(), place.resolve()):
        said = said.replace(f"{known}/", "").replace(str(known), "its directory")
    return said


def _opened(place: Path) -> Checkpoint | None:
    """The base; whoever checks the recipe says what is wrong with it."""
    with suppress(MergegateError):
        return open_checkpoint(place)
    return None


def _brings_adapter(place: Path) -> bool:
    """Whether a client is an adapter: what has a configuration of its own is a model, whatever else lies there."""
    return is_adapter(place) and not (place / "config.json").exists()


def _adapted(begun: Checkpoint | None, base: str, name: str, place: Path) -> Checkpoint | None:
    """What the round begins with, with the adapter of a client on it; None where that cannot be opened.

    Raises:
        InvalidInput: The adapter cannot be applied, or not be named in a recipe.
    """
    if "+" in base:
        raise InvalidInput(f"base_model {base}", found="a base with an adapter", expected="a model that takes another")
    if "@" in name or "+" in name:
        raise InvalidInput(name, found="an adapter with @ or + in its name", expected="a name that a recipe can have")
    adapter = open_adapter(place)
    return apply_adapter(begun, adapter) if begun else None


def _require_like(base: Checkpoint | None, client: Checkpoint | None) -> None:
    """Raise InvalidInput unless the client has the tensors of the base, in their shapes."""
    for name, tensor in base.tensors.items() if base and client else ():
        assert client is not None
        own = client.tensors.get(name)
        if own is None or own.shape != tensor.shape:
            found = "missing" if own is None else f"shape {list(own.shape)}"
            raise InvalidInput(name, found=found, expected=f"shape {list(tensor.shape)}, as in the base")


def _samples_of(name: str, place: Path, said: Mapping[str, float]) -> float | None:
    if name in said:
        return float(said[name])
    card = read_card(place)
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
    known = [client for client in clients if client.samples is not None]
    if known and len(known) < len(clients):
        lacking = next(client.name for client in clients if client.samples is None)
        raise InvalidInput(
            f"{where}: samples", found=f"none of {lacking}", expected="of each client, or of none: others have some"
        )
    weighted = method.parameter("weight") is not None
    if known and not weighted:
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
