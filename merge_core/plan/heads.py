"""Decide which output head the result has if some models store one and others tie it to the embedding.

If any merged model has an output head of its own, the result has one. It is the merge of all heads, where the embedding
serves as the head of each model that ties it. This equals untying the models first and then merging them, and does not
depend on their order. The result is tied only if all models are. Opening a checkpoint decides from the stored bytes
whether its head is its own (:mod:`merge_core.checkpoint.heads`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mergegate.merge_core.architecture import has_own_head, is_base_class, is_embedding, is_head
from mergegate.merge_core.checkpoint import Checkpoint, ties_embeddings, with_tie
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import Recipe


def with_head(
    recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> tuple[Checkpoint, list[Finding]]:
    """Return ``donor`` with the head and the tie flag that the result needs, and findings about heads that are lost.

    If a merged model has a head of its own and the donor has none, the donor's embedding becomes its head, under the
    name that the head has in the other model. If the donor has no counterpart, the head is lost. If no model has a head
    of its own, and another model is flagged as tied while the donor has no flag, the result is flagged as tied. Models
    that name their embeddings differently are reported elsewhere.
    """
    if has_own_head(donor):
        return donor, []
    names = dict.fromkeys(str(source.model) for source in recipe.sources)
    if ties_embeddings(donor.config) is None and any(ties_embeddings(checkpoints[name].config) for name in names):
        donor = replace(donor, config=with_tie(donor.config, value=True))
    untied = [] if is_base_class(donor.class_name) else [name for name in names if has_own_head(checkpoints[name])]
    tables = [tensor for tensor in donor.tensors.values() if is_embedding(tensor.name)]
    for name in untied:
        head = next(tensor for tensor in checkpoints[name].tensors if is_head(tensor))
        table = donor.tensors.get(head) or (tables[0] if len(tables) == 1 else None)
        if table is not None and table.name in checkpoints[name].tensors:
            tensors = {**donor.tensors, head: replace(table, name=head)}
            return replace(donor, tensors=tensors, config=with_tie(donor.config, value=False)), []
    return donor, [
        Finding(
            "block",
            f"{name}: config.json: tie_word_embeddings",
            found="the model has an output head of its own",
            expected=f"an embedding in {donor.directory.name} that can replace the head",
            remedy=f"set base_model: {name}",
        )
        for name in untied
    ]
