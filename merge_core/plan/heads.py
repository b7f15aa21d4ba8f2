"""Decide which output head the result has if some models store one and others tie it to the embedding.

If any merged model has an output head of its own, the result has one. It is the merge of all heads, where the embedding
serves as the head of each model that ties it. This equals untying the models first and then merging them, and does not
depend on their order. The result is tied only if all models are. Opening a checkpoint decides from the stored bytes
whether its head is its own (:mod:`merge_core.checkpoint.heads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergegate.merge_core.architecture import has_own_head, is_base_class, is_embedding, is_head
from mergegate.merge_core.checkpoint import Checkpoint, ties_embeddings, with_tie
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import Recipe


def with_head(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return ``donor`` with the head and the tie flag that the result needs.

    If a merged model has a head of its own and the donor has none, the donor's embedding becomes its head, under the
    name that the head has in the other model. If no model has a head of its own, and another model is flagged as tied
    while the donor has no flag, the result is flagged as tied. Models that name their embeddings differently are
    reported elsewhere.
    """
    if has_own_head(donor):
        return donor
    merged = (str(source.model) for module in recipe.modules for cut in module.slices for source in cut.sources)
    if ties_embeddings(donor.config) is None and any(ties_embeddings(checkpoints[name].config) for name in merged):
        donor = replace(donor, config=with_tie(donor.config, value=True))
    for name in _untied_models(recipe, donor, checkpoints):
        head = next(tensor for tensor in checkpoints[name].tensors if is_head(tensor))
        tables = [tensor for tensor in donor.tensors.values() if is_embedding(tensor.name)]
        table = donor.tensors.get(head) or (tables[0] if len(tables) == 1 else None)
        if table is None or table.name not in checkpoints[name].tensors:
            continue
        tensors = {**donor.tensors, head: replace(table, name=head)}
        return replace(donor, tensors=tensors, config=with_tie(donor.config, value=False))
    return donor


def lost_heads(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield a finding for each model whose own head the result cannot have, because the donor has no counterpart."""
    if has_own_head(donor):
        return
    for name in _untied_models(recipe, donor, checkpoints):
        yield Finding(
            "block",
            f"{name}: config.json: tie_word_embeddings",
            found="the model has an output head of its own",
            expected=f"an embedding in {donor.directory.name} that can replace the head",
            remedy=f"set base_model: {name}",
        )


def _untied_models(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    """Yield the merged models that have a head of their own, in the order of the recipe.

    Yield none if the donor is a base network.
    """
    merged = (str(source.model) for module in recipe.modules for cut in module.slices for source in cut.sources)
    if not is_base_class(donor.class_name):
        yield from (name for name in dict.fromkeys(merged) if has_own_head(checkpoints[name]))
