"""Older and newer names of the same tensors: a parent in another layout is read under the donor's names.

A view: another table over the same bytes. Each tensor keeps the name that it has on disk beside the one that it goes
by, as a tied head goes by the head's name and is stored as the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from merge_core.architecture.architecture import is_optional
from merge_core.architecture.families import find_family
from merge_core.checkpoint import Checkpoint


def in_layout_of(donor: Checkpoint, other: Checkpoint) -> Checkpoint:
    """``other`` under the names of ``donor``; itself where it has them already or no renaming gives them.

    The renamings are those of the donor's family, in both directions. One is taken when it gives every tensor of the
    donor that all models of an architecture have.
    """
    family = find_family(donor.config)
    if family is None or donor.tensors.keys() <= other.tensors.keys():
        return other
    needed = {name for name in donor.tensors if not is_optional(name)}
    if needed <= other.tensors.keys():
        return other
    for layout in family.layouts:
        for pairs in (layout, [(new, old) for old, new in layout]):
            renamed = dict(_renamed(other.tensors, pairs))
            if len(renamed) == len(other.tensors) and needed <= renamed.keys():
                return replace(other, tensors={name: other.tensors[old] for name, old in renamed.items()})
    return other


def _renamed(names: Mapping[str, object], pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """``(new name, name)``: of each name the longest beginning that one of ``pairs`` replaces."""
    ordered = sorted(pairs, key=lambda pair: -len(pair[0]))
    for name in names:
        # What has the new beginning already is in no need of it: 'model.' is one of 'model.language_model.'.
        if any(name.startswith(new) and new.startswith(old) for old, new in ordered):
            yield name, name
            continue
        for old, new in ordered:
            if name.startswith(old):
                yield new + name.removeprefix(old), name
                break
        else:
            yield name, name
