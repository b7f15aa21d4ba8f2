"""Heads that are tied in one model and not in another: one rule, whichever comes first.

If any merged model has an output head of its own, the result has one: the merge of the heads, for which the embedding
stands in where a model's is tied to it. That is the same function as merging each model after untying it. The result is
tied only where all are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from merge_core.architecture import has_own_head, is_embedding, is_head, untied
from merge_core.checkpoint import AnyTensor, Checkpoint
from merge_core.errors import Finding
from merge_core.recipe import Recipe


def with_head(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """``donor`` with the head that the result needs, if it has none of its own and a merged model has.

    The head's tensor is a second name for the donor's embedding: what a tied head is. Nothing is changed where the
    models name their embeddings in different ways, which is found elsewhere.
    """
    if has_own_head(donor):
        return donor
    for name in _untied_models(recipe, checkpoints):
        head = next(tensor for tensor in checkpoints[name].tensors if is_head(tensor))
        embedding = tied_to(donor, head)
        if embedding is None or embedding.name not in checkpoints[name].tensors:
            continue
        tensors = {**donor.tensors, head: replace(embedding, name=head)}
        return replace(donor, tensors=tensors, config=untied(donor.config))
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
    for name in _untied_models(recipe, checkpoints):
        yield Finding(
            "block",
            f"{name}: config.json: tie_word_embeddings",
            found="an output head of its own",
            expected=f"an embedding in {donor.directory.name} that can stand for its head",
            remedy=f"name {name} as base_model",
        )


def _untied_models(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    """The merged models that have a head of their own, in the order of the recipe."""
    merged = (str(source.model) for module in recipe.modules for cut in module.slices for source in cut.sources)
    yield from (name for name in dict.fromkeys(merged) if has_own_head(checkpoints[name]))
