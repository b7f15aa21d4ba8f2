"""Store fingerprints of known models with their licenses in a file that users extend and share.

The file has one JSON object per line, so several files can be concatenated. It contains samples of 128 elements per
matrix, but no weights that a model could be rebuilt from::

    add_to_index(path, IndexedModel(name="acme/model", license="mit", digest=..., samples=fingerprint.to_json()))
    index = read_index(path)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergegate.merge_core.analysis import Fingerprint, take_fingerprint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import hold_lock, write_state
from mergegate.merge_core.parsing import JsonBounds, line_location, parse_json, parsing_errors, read_lines
from mergegate.tasks.checkpoints import ResolvedCheckpoint, open_parent
from mergegate.tasks.checkpoints.hub import element_reader

INDEX_FILE = "fingerprints.jsonl"
"""Name of the project's own index, in the directory of its state."""

_LONGEST_LINE = 4 << 20  # Bytes. A fingerprint of 1,024 tensors takes half a MiB.
_MOST_LINES = 100_000
_EXPECTED = "a line that 'mergegate fingerprint' has written"
LONGEST_NAME = 300
"""Largest number of characters in the name of a model or a license."""
_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class IndexedAncestor(BaseModel):
    """A model that an indexed model was derived from, as its card says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    license: _Name


class IndexedModel(BaseModel):
    """A known model: name, license, ancestors and fingerprint.

    Attributes:
        format: Version of the file format.
        name: Name by which cards refer to the model, usually ``org/name``.
        license: Identifier of its license.
        ancestors: Models that it was derived from.
        revision: Commit on the Hub, or None.
        digest: sha256 of the samples, independent of tensor names.
        samples: The fingerprint (see ``Fingerprint.to_json``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    name: _Name
    license: _Name
    ancestors: tuple[IndexedAncestor, ...] = ()
    revision: str | None = None
    digest: str
    samples: dict[str, Any]

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

    Raises:
        InvalidInput: The files do not form a checkpoint, or cannot be read.
        Refused: The Hub does not serve them.
    """
    checkpoint = open_parent(parent.model_copy(update={"adapter": None}))
    return take_fingerprint(checkpoint.tensors, element_reader(parent.snapshot), most)


def read_index(path: Path) -> tuple[IndexedModel, ...]:
    """Return the models in an index. The last line about a name counts.

    Raises:
        InvalidInput: The file cannot be read, or a line is damaged.
    """
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
    """Add a model to an index, or replace the model of that name. A missing file is created.

    Raises:
        InvalidInput: The file is not an index.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f"{path.name}.lock"), remove=True, required=False):
        known: Sequence[IndexedModel] = read_index(path) if path.exists() else ()
        models = [*(each for each in known if each.name != model.name), model]
        lines = [each.model_dump_json() for each in models]
        write_state(path, ("\n".join(lines) + "\n").encode())
