"""Read a parent whose tensors have older names or another prefix under the names of the donor.

The result is a view, that is, a new table over the same bytes. Each tensor keeps its name on disk in addition to its
name in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mergegate.merge_core.architecture.architecture import is_optional
from mergegate.merge_core.architecture.families import find_family
from mergegate.merge_core.architecture.layers import parse_layer_place
from mergegate.merge_core.checkpoint import Checkpoint


def rename_to_layout(donor: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return ``other`` under the names of ``donor``, unchanged if it already has them or no renaming produces them.

    The candidates are the renamings of the donor's family, in both directions, and the prefix of the base network
    (``bert.``, ``model.``, ``transformer.``). Models with a head store this prefix, and the base network alone does
    not. transformers adds or strips it when it loads a model.

    A renaming of the family is used if it produces every tensor of the donor that all models of an architecture have. A
    prefix is used if it makes the layer names agree.
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
    """Return ``other`` with the prefix of the base network added or stripped, unchanged if no prefix fits."""
    donor_stacks, other_stacks = (
        frozenset(place.stack for name in checkpoint.tensors if (place := parse_layer_place(name)) is not None)
        for checkpoint in (donor, other)
    )
    if donor_stacks & other_stacks:
        return other
    for prefix in sorted({f"{stack.partition('.')[0]}." for stack in donor_stacks | other_stacks if "." in stack}):
        if all(prefix + stack in donor_stacks for stack in other_stacks):
            # Heads have no prefix in either layout.
            names = {
                prefix + name if parse_layer_place(name) or prefix + name in donor.tensors else name: name
                for name in other.tensors
            }
        elif all(stack.removeprefix(prefix) in donor_stacks for stack in other_stacks):
            names = {name.removeprefix(prefix): name for name in other.tensors}
        else:
            continue
        if len(names) == len(other.tensors):
            return replace(other, tensors={new: other.tensors[name] for new, name in names.items()})
    return other


def _renamed(names: Mapping[str, object], pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield ``(new name, name)`` for each name, replacing its longest prefix that is in ``pairs``."""
    ordered = sorted(pairs, key=lambda pair: -len(pair[0]))
    for name in names:
        # A name that already has the new prefix stays as it is. 'model.' is also a prefix of 'model.language_model.'.
        if any(name.startswith(new) and new.startswith(old) for old, new in ordered):
            yield name, name
            continue
        for old, new in ordered:
            if name.startswith(old):
                yield new + name.removeprefix(old), name
                break
        else:
            yield name, name
