"""Layouts of the same tensors: a parent with older names, or another prefix, is read under the donor's names.

The result is a view: another table over the same bytes. Each tensor keeps its name on disk next to the name in the
table, as a tied head has the head's name and is stored as the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mergegate.merge_core.architecture.architecture import is_optional
from mergegate.merge_core.architecture.families import find_family
from mergegate.merge_core.architecture.layers import parse_layer_place
from mergegate.merge_core.checkpoint import Checkpoint


def rename_to_layout(donor: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return ``other`` under the names of ``donor``; unchanged if it has them already or no renaming gives them.

    The renamings are those of the donor's family, in both directions, and the prefix of the base network (``bert.``,
    ``model.``, ``transformer.``): models with a head store it, and the base network alone does not. transformers adds
    or strips that prefix when it loads a model. A family's renaming is taken if it gives every tensor of the donor that
    all models of an architecture have, a prefix if it makes the layers agree.
    """
    if donor.tensors.keys() <= other.tensors.keys():
        return other
    needed = {name for name in donor.tensors if not is_optional(name)}
    if needed <= other.tensors.keys():
        return other
    family = find_family(donor.config)
    for layout in family.layouts if family else ():
        for pairs in (layout, [(new, old) for old, new in layout]):
            renamed = dict(_renamed(other.tensors, pairs))
            if len(renamed) == len(other.tensors) and needed <= renamed.keys():
                return replace(other, tensors={name: other.tensors[old] for name, old in renamed.items()})
    return _with_prefix_of(donor, other)


def _with_prefix_of(donor: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return ``other`` with the donor's prefix of the base network, added or stripped; unchanged if no prefix fits."""
    mine, theirs = (
        frozenset(at.stack for name in one.tensors if (at := parse_layer_place(name)) is not None)
        for one in (donor, other)
    )
    if mine & theirs:
        return other
    for prefix in sorted({f"{stack.partition('.')[0]}." for stack in mine | theirs if "." in stack}):
        if all(prefix + stack in mine for stack in theirs):
            # Heads have no prefix in either layout.
            names = {
                prefix + name if parse_layer_place(name) or prefix + name in donor.tensors else name: name
                for name in other.tensors
            }
        elif all(stack.removeprefix(prefix) in mine for stack in theirs):
            names = {name.removeprefix(prefix): name for name in other.tensors}
        else:
            continue
        if len(names) == len(other.tensors):
            return replace(other, tensors={new: other.tensors[name] for new, name in names.items()})
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
