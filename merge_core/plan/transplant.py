"""Plan a model with another model's tokenizer: its weights stay, and its token tables are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mergegate.merge_core.architecture import with_vocabulary
from mergegate.merge_core.checkpoint import TEXT_KINDS, Checkpoint, StoredTensor, companion_kind
from mergegate.merge_core.checkpoint.vocabulary import TokenizerDefinition
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.plan.jobs import MergePlan
from mergegate.merge_core.plan.plan import plan_merge
from mergegate.merge_core.plan.special_ids import GENERATION, follow_tokens, serialize_config
from mergegate.merge_core.recipe import load_recipe

_SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def plan_transplant(
    model: Checkpoint,
    donor: Checkpoint,
    tables: Mapping[str, StoredTensor],
    tokenizers: tuple[TokenizerDefinition, TokenizerDefinition],
) -> MergePlan:
    """Return the plan of ``model`` with the tokenizer of ``donor``.

    Args:
        model: Model that provides weights and configuration.
        donor: Model that provides the tokenizer.
        tables: New token tables by name, all with the same number of rows.
        tokenizers: Tokenizer of the model and tokenizer of the donor.

    Raises:
        InvalidInput: The model cannot be planned.
    """
    size = next(iter(tables.values())).shape[0]
    before = {number: token for token, number in tokenizers[0].ids.items()}
    after = tokenizers[1].ids

    def translate(content: Mapping[str, Any], marks: Mapping[str, Any]) -> dict[str, Any]:
        moved, _ = follow_tokens(content, before, after)
        return {**moved, **{key: marks[key] for key in _SPECIAL_KEYS if key in marks}}

    view = replace(
        model,
        tensors={**model.tensors, **tables},
        config=with_vocabulary(translate(model.config, donor.config), size),
    )
    plan = plan_merge(load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "model"}]}), {"model": view})
    companions = plan.companions.only(lambda name: companion_kind(name) not in TEXT_KINDS)
    companions = companions.changed(donor.companions.only(lambda name: companion_kind(name) in TEXT_KINDS).sources)
    for checkpoint in (model, donor):
        if (content := checkpoint.companions.json(GENERATION)) is not None:
            donor_settings = donor.companions.json(GENERATION)
            marks = donor.config if donor_settings is None else donor_settings
            merged_settings = {**content, **marks} if checkpoint is donor else translate(content, marks)
            companions = companions.changed({GENERATION: serialize_config(merged_settings)})
            break
    return replace(plan, tokenizer=donor, companions=companions, chat_templates=donor.chat_templates)
