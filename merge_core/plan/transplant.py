"""Plan a model with another model's tokenizer: only its token tables and tokenizer files are replaced."""

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
from mergegate.merge_core.plan.special_ids import GENERATION, SPECIAL_KEYS, follow_tokens, serialize_config
from mergegate.merge_core.recipe import load_recipe


def plan_transplant(
    model: Checkpoint,
    donor: Checkpoint,
    tables: Mapping[str, StoredTensor],
    tokenizers: tuple[TokenizerDefinition, TokenizerDefinition],
) -> MergePlan:
    """Return the plan that gives ``model`` the tokenizer of ``donor`` and the token tables ``tables``.

    Raises:
        InvalidInput: The model cannot be planned.
    """
    size = next(iter(tables.values())).shape[0]

    def translate(content: Mapping[str, Any], donor_ids: Mapping[str, Any]) -> dict[str, Any]:
        moved, _ = follow_tokens(content, tokenizers[0].ids, tokenizers[1].ids)
        return {**moved, **{key: donor_ids[key] for key in SPECIAL_KEYS if key in donor_ids}}

    view = replace(
        model, tensors={**model.tensors, **tables}, config=with_vocabulary(translate(model.config, donor.config), size)
    )
    plan = plan_merge(load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "model"}]}), {"model": view})
    companions = plan.companions.only(lambda name: companion_kind(name) not in TEXT_KINDS)
    companions = companions.with_changes(donor.companions.only(lambda name: companion_kind(name) in TEXT_KINDS).sources)
    for checkpoint in (model, donor):
        if (content := checkpoint.companions.json(GENERATION)) is not None:
            donor_settings = donor.companions.json(GENERATION)
            donor_ids = donor.config if donor_settings is None else donor_settings
            merged_settings = {**content, **donor_ids} if checkpoint is donor else translate(content, donor_ids)
            companions = companions.with_changes({GENERATION: serialize_config(merged_settings)})
            break
    return replace(plan, tokenizer=donor, companions=companions, chat_templates=donor.chat_templates)
