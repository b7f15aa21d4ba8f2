"""Read a parent whose tensors have older names or another prefix under the names of the donor.

The result is a view, that is, a new table over the same bytes. Each tensor keeps its name on disk in addition to its
name in the table.
"""

from __future__ import annotations

from dataclasses import replace

from mergegate.merge_core.architecture.architecture import is_optional
from mergegate.merge_core.architecture.families import find_family
from mergegate.merge_core.architecture.tensor_kinds import parse_layer_place, stacks
from mergegate.merge_core.checkpoint import Checkpoint


def rename_to_layout(donor: Checkpoint, parent: Checkpoint) -> Checkpoint:
    """Return ``parent`` under the names of ``donor``, unchanged if it already has them or no renaming produces them.

    The candidates are the renamings of the donor's family, in both directions, and the prefix of the base network
    (``bert.``, ``model.``, ``transformer.``). Models with a head store this prefix, and the base network alone does
    not. transformers adds or strips it when it loads a model.

    A renaming of the family is used if it produces every tensor of the donor that all models of an architecture have. A
    prefix is used if it makes the layer names agree.
    """
    needed = {name for name in donor.tensors if not is_optional(name)}
    if needed <= parent.tensors.keys():
        return parent
    family = find_family(donor.config)
    for layout in family.layouts if family else ():
        for pairs in (layout, [(new, old) for old, new in layout]):
            names = {}
            for name in parent.tensors:
                # Replace the longest old prefix. A name that already has the new prefix stays as it is, because
                # 'model.' is also a prefix of 'model.language_model.'.
                is_new = any(name.startswith(new) and new.startswith(old) for old, new in pairs)
                fitting = [pair for pair in pairs if name.startswith(pair[0])] if not is_new else []
                old, new = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
                names[new + name.removeprefix(old)] = name
            if len(names) == len(parent.tensors) and needed <= names.keys():
                return replace(parent, tensors={new: parent.tensors[name] for new, name in names.items()})
    donor_stacks, parent_stacks = stacks(donor.tensors).keys(), stacks(parent.tensors).keys()
    if donor_stacks & parent_stacks:
        return parent
    for prefix in sorted({f"{stack.partition('.')[0]}." for stack in donor_stacks | parent_stacks if "." in stack}):
        if all(prefix + stack in donor_stacks for stack in parent_stacks):
            # Heads have no prefix in either layout.
            names = {
                prefix + name if parse_layer_place(name) or prefix + name in donor.tensors else name: name
                for name in parent.tensors
            }
        elif all(stack.removeprefix(prefix) in donor_stacks for stack in parent_stacks):
            names = {name.removeprefix(prefix): name for name in parent.tensors}
        else:
            continue
        if len(names) == len(parent.tensors):
            return replace(parent, tensors={new: parent.tensors[name] for new, name in names.items()})
    return parent
