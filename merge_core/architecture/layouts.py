"""Give a parent whose tensors have older names or another prefix the names of the donor.

Only the table of tensors changes. It refers to the same bytes on disk under other names.
"""

from __future__ import annotations

from dataclasses import replace

from mergegate.merge_core.architecture.architecture import is_optional
from mergegate.merge_core.architecture.conversions import Conversions
from mergegate.merge_core.architecture.families import find_family
from mergegate.merge_core.architecture.tensor_kinds import parse_layer_place, stacks
from mergegate.merge_core.checkpoint import Checkpoint


def rename_to_layout(donor: Checkpoint, parent: Checkpoint) -> Checkpoint:
    """Return ``parent`` with the tensor names of ``donor``, or unchanged if no renaming leads to these names.

    A renaming between layouts of the donor's family applies, in either direction, if it produces all tensor names of
    the donor that are not optional. Otherwise, the prefix of the base network (``bert.``, ``model.``,
    ``transformer.``) is added or removed if the layer names then agree. Models with a head store this prefix, and the
    base network alone does not.
    """
    needed = {name for name in donor.tensors if not is_optional(name)}
    if needed <= parent.tensors.keys():
        return parent
    if donor.config.get("model_type") == parent.config.get("model_type"):
        parent = _with_loaded_names(donor, parent)
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


def _with_loaded_names(donor: Checkpoint, parent: Checkpoint) -> Checkpoint:
    """Return ``parent`` with the donor's name for each tensor that transformers loads under the same name.

    Such names are ``LayerNorm.gamma`` and ``LayerNorm.weight``. Tensors that transformers joins or splits keep their
    names.
    """
    donor_names = {loaded: name for name, loaded in _loaded_names(donor).items()}
    loaded_names = _loaded_names(parent)
    names = {name: donor_names.get(loaded_names.get(name, ()), name) for name in parent.tensors}
    if len(set(names.values())) != len(names):
        return parent  # Two stored tensors have one name in memory, such as a tensor and its copy.
    return replace(parent, tensors={names[name]: tensor for name, tensor in parent.tensors.items()})


def _loaded_names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Return the names in memory of each stored tensor that transformers neither joins nor splits."""
    conversions = Conversions(checkpoint.config, checkpoint.class_name, checkpoint.tensors)
    loaded = {name: conversions.in_memory(name) for name in checkpoint.tensors}
    return {name: memory.names for name, memory in loaded.items() if not memory.operations}
