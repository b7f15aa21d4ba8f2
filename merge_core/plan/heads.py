"""Output heads of a merge whose models store one, tie it to the embedding, or differ in that: independent of order.

If any merged model has an output head of its own, the result has one: the merge of the heads, with the embedding as the
head of each model that ties it. That is the same function as merging the models after untying them. The result is tied
only if all models are. Whether a stored head is one of its own was decided from its bytes when the model was opened
(:mod:`merge_core.checkpoint.heads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergegate.merge_core.architecture import has_own_head, is_base_class, is_embedding, is_head
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint, ties_embeddings, with_tie
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import Recipe


def with_head(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return ``donor`` with the head and the flag that the result needs.

    If a merged model has a head of its own and the donor has none, the donor's embedding becomes its head under the
    head's name, as tying means. If no model has one, and another model says that it is tied where the donor says
    nothing, the result says it too. Models that name their embeddings differently are reported elsewhere.
    """
    if has_own_head(donor):
        return donor
    merged = (str(source.model) for module in recipe.modules for cut in module.slices for source in cut.sources)
    if ties_embeddings(donor.config) is None and any(ties_embeddings(checkpoints[name].config) for name in merged):
        donor = replace(donor, config=with_tie(donor.config, value=True))
    for name in _untied_models(recipe, donor, checkpoints):
        head = next(tensor for tensor in checkpoints[name].tensors if is_head(tensor))
        embedding = tied_to(donor, head)
        if embedding is None or embedding.name not in checkpoints[name].tensors:
            continue
        tensors = {**donor.tensors, head: replace(embedding, name=head)}
        return replace(donor, tensors=tensors, config=with_tie(donor.config, value=False))
    return donor


def tied_to(checkpoint: Checkpoint, head: str) -> AnyTensor | None:
    """The table that a tied ``head`` is; None where it cannot be told."""
    if head in checkpoint.tensors:
        return checkpoint.tensors[head]
    embeddings = [tensor for tensor in checkpoint.tensors.values() if is_embedding(tensor.name)]
    return embeddings[0] if len(embeddings) == 1 else None


def lost_heads(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Models whose own head would have no place in the result, because nothing can stand for the donor's."""
    if has_own_head(donor):
        return
    for name in _untied_models(recipe, donor, checkpoints):
        yield Finding(
            "block",
            f"{name}: config.json: tie_word_embeddings",
            found="an output head of its own",
            expected=f"an embedding in {donor.directory.name} that can stand for its head",
            remedy=f"name {name} as base_model",
        )


def _untied_models(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    """Yield the merged models that have a head of their own, in the order of the recipe; none for a base network."""
    merged = (str(source.model) for module in recipe.modules for cut in module.slices for source in cut.sources)
    if not is_base_class(donor.class_name):
        yield from (name for name in dict.fromkeys(merged) if has_own_head(checkpoints[name]))
