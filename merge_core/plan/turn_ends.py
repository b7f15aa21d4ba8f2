"""Which tokens end an answer, when the recipe says in which chat template it is asked.

A template and the tokens that end a turn in it belong together: a merge that got a fine-tune's template and its base's
``generation_config.json`` would answer, and then go on talking to itself. So the ends that come with the template are
added to those that the result has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergegate.merge_core.checkpoint import DEFAULT, TURN_ENDS, ChatTemplates, Checkpoint, Companions
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.plan.alignment import Alignment
from mergegate.merge_core.plan.special_ids import GENERATION, follow_tokens, serialize_config

_END = "eos_token_id"


def with_turn_ends(
    companions: Companions,
    tokenizer: Checkpoint,
    wanted: str,
    templates: ChatTemplates,
    parents: Mapping[str, Checkpoint],
    alignment: Alignment | None,
) -> Companions:
    """Add the tokens that end a turn in the result's chat template to its ``generation_config.json``.

    Args:
        companions: Files of the result.
        tokenizer: The checkpoint that gives the tokenizer's files.
        wanted: The recipe's ``chat_template``: a known name, ``auto``, or a text.
        templates: The chat templates that it stands for, by name.
        parents: Checkpoints of the recipe by reference.
        alignment: How their vocabularies become one; None: they are one.
    """
    own = companions.json(GENERATION) or {}
    ends = _numbers(own.get(_END) if own.get(_END) is not None else tokenizer.config.get(_END))
    # Settings of another donor speak of the result's ids already.
    if alignment is not None and (GENERATION not in companions or GENERATION in tokenizer.companions):
        ends = _moved(ends, alignment.wanted, alignment)
    more = [
        *_known_end(wanted, tokenizer, alignment),
        *(
            end
            for name, parent in parents.items()
            if parent.chat_template is not None and parent.chat_template == templates.get(DEFAULT)
            for end in _moved(_ends_of(parent), name, alignment)
        ),
    ]
    if not ends or set(more) <= set(ends):  # Without any there is nothing to add to.
        return companions
    content = {**own, _END: list(dict.fromkeys((*ends, *more)))}
    return companions.changed({GENERATION: serialize_config(content)})


def _ends_of(parent: Checkpoint) -> Sequence[int]:
    found = _numbers((parent.companions.json(GENERATION) or {}).get(_END))
    return found or _numbers(parent.config.get(_END))


def _moved(ends: Sequence[int], name: str | None, alignment: Alignment | None) -> list[int]:
    """Each end as the id that its token has in the result."""
    if alignment is None or name is None:
        return list(ends)
    before = {number: token for token, number in alignment.vocabularies[name].ids.items()}
    moved, _ = follow_tokens({_END: list(ends)}, before, alignment.ids)
    return _numbers(moved[_END])


def _known_end(wanted: str, tokenizer: Checkpoint, alignment: Alignment | None) -> Iterator[int]:
    """The token that ends a turn in a format known by name, where the vocabulary has it."""
    if wanted not in TURN_ENDS:
        return
    vocabulary = read_vocabulary(tokenizer.companions) if alignment is None else None
    ids = alignment.ids if alignment is not None else vocabulary.ids if vocabulary is not None else {}
    if TURN_ENDS[wanted] in ids:
        yield ids[TURN_ENDS[wanted]]


def _numbers(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one >= 0]
