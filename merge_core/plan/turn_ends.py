"""Set the tokens that end an answer when the recipe chooses a chat template.

A template and the tokens that end a turn in it belong together. A merge with a fine-tuned model's template and its
base's ``generation_config.json`` would answer and then continue talking to itself. mergegate therefore adds the
template's end tokens to those of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mergegate.merge_core.checkpoint import DEFAULT, TURN_ENDS, ChatTemplates, Checkpoint, Companions
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.plan.alignment import Alignment
from mergegate.merge_core.plan.special_ids import GENERATION, follow_tokens, serialize_config

_END = "eos_token_id"


def with_turn_ends(
    companions: Companions,
    tokenizer: Checkpoint,
    choice: str,
    templates: ChatTemplates,
    parents: Mapping[str, Checkpoint],
    alignment: Alignment | None,
) -> Companions:
    """Add the tokens that end a turn in the result's chat template to its ``generation_config.json``.

    ``choice`` is the recipe's ``chat_template``: a known name, ``auto``, or the text of a template. ``templates`` holds
    the result's chat templates by name. Without ``alignment``, all models have the same vocabulary.
    """
    generation = companions.json(GENERATION) or {}
    ends = _token_ids(generation.get(_END) if generation.get(_END) is not None else tokenizer.config.get(_END))
    # The generation settings of another donor already use the result's ids.
    if alignment is not None and (GENERATION not in companions or GENERATION in tokenizer.companions):
        ends = _translate_ends(ends, alignment.tokenizer_name, alignment)
    extra_ends: list[int] = []
    if choice in TURN_ENDS:  # A chat format known by name.
        vocabulary = read_vocabulary(tokenizer.companions) if alignment is None else alignment
        if vocabulary is not None and TURN_ENDS[choice] in vocabulary.ids:
            extra_ends.append(vocabulary.ids[TURN_ENDS[choice]])
    for name, parent in parents.items():
        if alignment is not None and name not in alignment.vocabularies:
            continue  # A base that is named only to measure differences. None of its tokens are matched.
        if parent.chat_template is not None and parent.chat_template == templates.get(DEFAULT):
            parent_ends = _token_ids((parent.companions.json(GENERATION) or {}).get(_END))
            extra_ends += _translate_ends(parent_ends or _token_ids(parent.config.get(_END)), name, alignment)
    if not ends or set(extra_ends) <= set(ends):  # Without existing ends there is nothing to extend.
        return companions
    content = {**generation, _END: list(dict.fromkeys((*ends, *extra_ends)))}
    return companions.with_changes({GENERATION: serialize_config(content)})


def _translate_ends(ends: Sequence[int], name: str | None, alignment: Alignment | None) -> list[int]:
    """Return the ids that the tokens ``ends`` of a model have in the result."""
    if alignment is None or name is None:
        return list(ends)
    moved, _ = follow_tokens({_END: list(ends)}, alignment.vocabularies[name].ids, alignment.ids)
    return _token_ids(moved[_END])


def _token_ids(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0]
