"""Find ancestors that no card declares, by comparing samples of the parents' weights with those of known models.

The known models are the other parents of the recipe and the models in an index of fingerprints. A parent that is a
copy, a fine-tune or a part of one of them descends from it, so the license of the known model binds, too. A model is
declared if a card or the recipe's base names it, or if a related model that is nearer is declared. Another parent never
hides a model of the index, except a declared ancestor of both: it tells which of the two is the nearer ancestor.

An index is a file that users extend and share. It has one JSON object per line, so several files can be concatenated.
It contains samples of 128 elements per matrix, but no weights that a model could be rebuilt from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from mergegate.merge_core.analysis import (
    LEAST_SHARE,
    MOST_TENSORS,
    Fingerprint,
    Relation,
    RelationKind,
    compare_fingerprints,
    take_fingerprint,
)
from mergegate.merge_core.errors import Finding, InvalidInput, Refused
from mergegate.merge_core.files import hold_lock, write_state
from mergegate.merge_core.parsing import JsonBounds, line_location, parse_json, parsing_errors, read_lines
from mergegate.merge_core.recipe import name_in_path
from mergegate.tasks.models.checkpoints import ResolvedCheckpoint, open_parent
from mergegate.tasks.models.checkpoints.hub import element_reader
from mergegate.tasks.preflight.licenses.resolve import quote_text
from mergegate.tasks.preflight.licenses.rules import Licensed, LicensedParent, join_words
from mergegate.tasks.preflight.licenses.table import LicenseTable

INDEX_FILE = "fingerprints.jsonl"
"""Name of the project's own index, in the directory of its state."""

_LONGEST_LINE = 4 << 20  # Bytes. A fingerprint of 1,024 tensors takes half a MiB.
_MOST_LINES = 100_000
_EXPECTED = "a line that 'mergegate fingerprint' has written"
LONGEST_NAME = 300
"""Largest number of characters in the name of a model or a license."""
_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class IndexedAncestor(BaseModel, frozen=True, extra="forbid"):
    """A model that an indexed model was derived from, as its card says."""

    name: _Name
    license: _Name


class IndexedModel(BaseModel, frozen=True, extra="forbid"):
    """A known model: name, license, ancestors and fingerprint."""

    format: Literal[1] = 1  # Version of the file format.
    name: _Name  # Name by which cards refer to the model, usually ``org/name``.
    license: _Name  # Identifier of its license.
    ancestors: tuple[IndexedAncestor, ...] = ()  # Models that it was derived from.
    revision: str | None = None  # Commit on the Hub, or None.
    digest: str  # sha256 of the samples, independent of tensor names.
    samples: dict[str, Any]  # The fingerprint (see ``Fingerprint.to_json``).

    @property
    def lineage(self) -> tuple[IndexedAncestor, ...]:
        """The model and its ancestors."""
        return (IndexedAncestor(name=self.name, license=self.license), *self.ancestors)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model's weights."""
        return Fingerprint.from_json(self.samples)


def fingerprint_model(parent: ResolvedCheckpoint, most: int) -> Fingerprint:
    """Return the fingerprint of a model without its adapter, from samples of at most ``most`` matrices.

    For a model on the Hub that is not downloaded, each sample takes one request for 128 elements.
    """
    checkpoint = open_parent(parent.model_copy(update={"adapter": None}))
    return take_fingerprint(checkpoint.tensors, element_reader(parent.snapshot), most)


def read_index(path: Path) -> tuple[IndexedModel, ...]:
    """Return the models in an index. The last line about a name counts."""
    models: dict[str, IndexedModel] = {}
    for number, line in read_lines(path, longest=_LONGEST_LINE, most=_MOST_LINES):
        if not line.strip():
            continue
        location = line_location(path, number)
        remedy = "remove the line, and run 'mergegate fingerprint' again"
        with parsing_errors(location, "not a fingerprint", expected=_EXPECTED, remedy=remedy):
            content = parse_json(line, location, bounds=JsonBounds(size=_LONGEST_LINE), expected=_EXPECTED)
            try:
                model = IndexedModel.model_validate(content)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(map(str, first["loc"])) or "line"
                raise ValueError(f"{field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
            digest = model.fingerprint.digest
        if digest != model.digest:
            raise InvalidInput(
                location,
                found=f"the samples of {model.name} do not have the recorded digest",
                expected=_EXPECTED,
                remedy=remedy,
            )
        models[model.name] = model
    return tuple(models.values())


def add_to_index(path: Path, model: IndexedModel) -> None:
    """Add a model to an index, or replace the model of that name. A missing file is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f"{path.name}.lock"), remove=True, required=False):
        known: Sequence[IndexedModel] = read_index(path) if path.exists() else ()
        models = [*(each for each in known if each.name != model.name), model]
        lines = [each.model_dump_json() for each in models]
        write_state(path, ("\n".join(lines) + "\n").encode())


# Number of samples of a parent on the Hub. Each takes one request. A local parent has no limit.
_HUB_SAMPLES = 64

_PAGE = re.compile(r"^https?://(?:www\.)?huggingface\.co/")


class UndeclaredRelation(BaseModel, frozen=True, extra="forbid"):
    """A parent whose weights are related to a model that its card does not name."""

    parent: str  # Name of the parent.
    declared: str  # License that the parent's card declares.
    model: str  # Name of the related model.
    licenses: tuple[str, ...]  # Identifiers of the licenses of that model and of its ancestors.
    kind: RelationKind  # Class of the relation. See ``merge_core.analysis.fingerprint.RelationKind``.
    share: float  # Share of the parent's matrices that are related, from 0 to 1.
    distance: float  # Relative distance of the related matrices from those of the model.
    equal: float  # Share of the related matrices that are equal up to rounding, from 0 to 1.
    # Whether the model counts as an ancestor. False for another parent of the merge, because either of them may be
    # derived from the other one, and both licenses bind the merge anyway.
    is_ancestor: bool
    # Statement of a user that the parent does not descend from the model, ``who: why``; empty if there is none.
    dismissed: str = ""

    @property
    def sentence(self) -> str:
        """Description of the relation."""
        near = f"within {100 * self.distance:.2g} % of"
        relation = {
            "copy": f"its weights equal those of {self.model}",
            "fine-tune": f"its weights are {near} {self.model}",
            "prefix": f"its layers are {near} the first layers of {self.model}",
            "stack": f"its layers are {near} layers of {self.model}, in another order or number",
            "part": f"{100 * self.share:.0f} % of its matrices are {near} matrices of {self.model}",
        }[self.kind]
        licenses = join_words(self.licenses)
        some_equal = f", and {100 * self.equal:.0f} % of them are equal" if 0 < self.equal < 1 else ""
        end = (
            "which its card does not name"
            if self.is_ancestor
            else "and neither card names the other model or a common base"
        )
        return f"{self.parent} declares {self.declared}, but {relation} ({licenses}){some_equal}, {end}"

    @property
    def summary(self) -> str:
        """Description of the relation, with the statement of the user who has dismissed it."""
        return f"{self.sentence}; dismissed by {self.dismissed}" if self.dismissed else self.sentence

    @property
    def dismissal(self) -> str:
        """Instruction for a user who knows that the parent does not descend from the model."""
        return (
            f"if {self.parent} is not related to {self.model}, add it to checks.license, for example "
            f"unrelated: {{{self.parent}: {{{self.model}: 'YOUR NAME: YOUR REASON'}}}}"
        )

    def finding(self) -> Finding | None:
        """Return a warning, or None if a user has dismissed the relation."""
        if self.dismissed:
            return None
        declare = (
            f"add base_model: {self.model} to the card of {self.parent}"
            if self.is_ancestor
            else "add base_model to the card of the one that descends from the other, or to both cards"
        )
        return Finding(
            "warn",
            "licenses",
            found=self.sentence,
            expected="a card that names every model whose weights it contains",
            remedy=(f"{declare}; {self.dismissal}"),
        )


WeightSampler = Callable[[ResolvedCheckpoint], Fingerprint | None]


def weight_sampler() -> WeightSampler:
    """Return a function that samples the weights of each parent once.

    It returns None for files that do not form a checkpoint. The check of the headers reports those.
    """
    samples: dict[Path, Fingerprint | None] = {}

    def sample(parent: ResolvedCheckpoint) -> Fingerprint | None:
        if parent.directory not in samples:
            try:
                tensors = open_parent(parent.model_copy(update={"adapter": None})).tensors
            except (InvalidInput, Refused):
                samples[parent.directory] = None
                return None
            most = MOST_TENSORS if parent.snapshot is None else _HUB_SAMPLES
            samples[parent.directory] = take_fingerprint(tensors, element_reader(parent.snapshot), most)
        return samples[parent.directory]

    return sample


@dataclass(frozen=True)
class KnownModels:
    """Models of an index, and the samples of the parents that are compared with them."""

    index: tuple[IndexedModel, ...] = ()
    sample: WeightSampler = field(default_factory=weight_sampler)


def read_known_models(own_index: Path, shared_index: Path | None = None) -> KnownModels:
    """Return the models of the project's own index, if it exists, and of the index that a profile names."""
    if shared_index and not shared_index.exists():
        raise InvalidInput(
            f"checks.license.fingerprints: {shared_index}",
            found="the file does not exist",
            expected="an index of fingerprints",
            remedy=f"create it with 'mergegate fingerprint MODEL --index {shared_index}', or correct the path",
        )
    models = {model.name: model for model in (read_index(shared_index) if shared_index else ())}
    if own_index.exists():
        models |= {model.name: model for model in read_index(own_index)}
    return KnownModels(tuple(models.values()))


@dataclass(frozen=True)
class _Known:
    """A model to compare with: an indexed model, or a parent with the declarations in its files."""

    name: str
    own: frozenset[str]  # All its names: of a parent, that in the recipe, and ``org/name`` on the Hub.
    above: frozenset[str]  # Names of the models that it descends from, and of the recipe's base.
    licenses: tuple[str, ...]  # Identifiers of all licenses that bind it.
    fingerprint: Fingerprint | None = None  # None if the weights were not sampled.
    is_parent: bool = False

    @property
    def all(self) -> frozenset[str]:
        return self.own | self.above


def _declared(
    parent: ResolvedCheckpoint, family: Sequence[LicensedParent], parents: Iterable[ResolvedCheckpoint]
) -> _Known:
    def own_names(model: ResolvedCheckpoint) -> set[str]:
        return {model.name.lower(), *([model.snapshot.repo.lower()] if model.snapshot else [])}

    ancestors = [model.name for model in family[1:]] + [item.name for model in family for item in model.unread]
    above = {_normalized(name) for name in ancestors}
    above.update(*(own_names(other) for other in parents if other.is_base and not parent.is_base))
    licenses = tuple(dict.fromkeys(license.id for model in family for license in model.licenses))
    return _Known(parent.name, frozenset(own_names(parent)), frozenset(above), licenses, is_parent=True)


def find_undeclared(
    parents: Sequence[ResolvedCheckpoint],
    families: Mapping[str, tuple[LicensedParent, ...]],
    index: Sequence[IndexedModel],
    dismissals: Mapping[str, Mapping[str, str]],
    sample: WeightSampler,
) -> tuple[UndeclaredRelation, ...]:
    """Return the relations of the parents' weights that no card and no recipe declares.

    Weights are read only if the index has a model, or if parents have different licenses and no declared relation.
    ``families`` are the declarations of each parent and its ancestors. ``dismissals`` are statements ``who: why`` that
    a parent does not descend from a model, by parent and model.
    """
    models = {parent.name: parent for parent in parents if parent.name in families}
    declarations = {name: _declared(parent, families[name], models.values()) for name, parent in models.items()}
    # Between parents with the same licenses, a relation changes nothing.
    pairs = {
        (first, second)
        for first, second in combinations(models, 2)
        if not declarations[first].all & declarations[second].all
        if set(declarations[first].licenses) != set(declarations[second].licenses)
    }
    compared = models if index else {name: models[name] for name in models if any(name in pair for pair in pairs)}
    sampled = [
        replace(declarations[name], fingerprint=taken) for name, parent in compared.items() if (taken := sample(parent))
    ]
    known_models = [
        _Known(
            model.name,
            _index_names(model.name),
            frozenset().union(*(_index_names(ancestor.name) for ancestor in model.ancestors)),
            tuple(dict.fromkeys(each.license for each in model.lineage)),
            model.fingerprint,
        )
        for model in index
    ]
    return tuple(
        UndeclaredRelation(
            parent=parent.name,
            declared=families[parent.name][0].license.id,
            model=quote_text(known.name),
            licenses=tuple(map(quote_text, known.licenses)),
            kind=relation.kind,
            share=round(relation.share, 3),
            distance=float(f"{relation.distance:.2g}"),
            equal=round(relation.equal, 3),
            is_ancestor=not known.is_parent,
            # Messages shorten long names, so a user may have copied the short form.
            dismissed={quote_text(model): why for model, why in dismissals.get(parent.name, {}).items()}.get(
                quote_text(known.name), ""
            ),
        )
        for parent in sampled
        for known, relation in _unexplained(parent, [*known_models, *sampled])
        if not known.is_parent or (parent.name, known.name) in pairs
    )


def _unexplained(parent: _Known, known_models: Sequence[_Known]) -> Iterator[tuple[_Known, Relation]]:
    """Yield the models that are related to a parent and nearest to some of its matrices, but not declared."""

    def is_declared(candidate: _Known) -> bool:
        if candidate.is_parent:
            return bool(parent.all & candidate.all)
        # The name of a local directory is not a declaration.
        return bool((parent.above | {own for own in parent.own if "/" in own}) & candidate.own)

    # Of equally near models, a declared one counts first, and then one from the index.
    others = sorted(
        (known for known in known_models if known is not parent),
        key=lambda known: (not is_declared(known), known.is_parent),
    )
    measured = frozenset().union(*(known.own for known in others))

    def competes(model: _Known, rival: _Known) -> bool:
        """Return whether ``rival`` can explain ``model``: a parent only if it is a declared ancestor of both models."""
        return model.is_parent or not rival.is_parent or bool(parent.above & model.above & rival.own)

    rivals = np.array([[competes(known, rival) for rival in others] for known in others], bool)
    own, *theirs = [known.fingerprint for known in (parent, *others) if known.fingerprint]  # All of them were sampled.
    relations = compare_fingerprints(own, theirs, rivals)
    for known, relation in zip(others, relations, strict=True):
        if relation is None or relation.nearest < LEAST_SHARE or is_declared(known):
            continue
        # Both descend from a declared model whose weights are not available, or the known one from the parent.
        common = parent.all & known.above
        if common - measured or common & parent.own:
            continue
        # It is this very model, under its own license.
        if relation.kind == "copy" and set(known.licenses) <= set(parent.licenses):
            continue
        yield known, relation


def with_undeclared(
    families: Mapping[str, tuple[LicensedParent, ...]],
    relations: Sequence[UndeclaredRelation],
    index: Sequence[IndexedModel],
    table: LicenseTable,
) -> dict[str, tuple[LicensedParent, ...]]:
    """Return ``families`` with the undeclared ancestors, as if the cards of the parents had named them."""
    indexed = {quote_text(model.name): model for model in index}
    extended = dict(families)
    for relation in relations:
        if not relation.is_ancestor or relation.dismissed:
            continue
        model = indexed[relation.model]
        parent, *rest = extended[relation.parent]
        known_names = {item.name for item in (parent, *rest)}
        added = tuple(
            Licensed(
                name=quote_text(each.name),
                license=table.lookup(each.license),
                revision=model.revision if each.name == model.name else None,
            )
            for each in model.lineage
            if quote_text(each.name) not in known_names
        )
        first = parent.model_copy(update={"ancestors": (*parent.ancestors, *added)})
        family = [LicensedParent(**{field: getattr(item, field) for field in Licensed.model_fields}) for item in added]
        extended[relation.parent] = (first, *rest, *family)
    return extended


def _normalized(text: str) -> str:
    """Return the form under which names of models are compared: ``org/name`` in lower case, or the end of a path."""
    name = _PAGE.sub("", text.strip().lower()).rstrip("/")
    is_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    return f"*/{name_in_path(name)}" if is_path else name


def _index_names(text: str) -> frozenset[str]:
    """Return all names that declare an indexed model: its own, and paths that end with it."""
    return frozenset({_normalized(text), f"*/{name_in_path(text.lower())}"})
