"""Which tokens end an answer, when the recipe says in which chat template it is asked.

A template and the tokens that end a turn in it belong together: a merge that got a fine-tune's template and its base's
``generation_config.json`` would answer, and then go on talking to itself. So the ends that come with the template are
added to those that the result has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from merge_core.checkpoint import TURN_ENDS, Checkpoint
from merge_core.checkpoint.vocabulary import read_vocabulary
from merge_core.parsing import read_json
from merge_core.plan.alignment import Alignment
from merge_core.plan.special_ids import GENERATION, config_bytes, follow_tokens

_END = "eos_token_id"


def with_turn_ends(
    rewritten: Mapping[str, bytes | None],
    tokenizer: Checkpoint,
    wanted: str,
    template: str,
    parents: Mapping[str, Checkpoint],
    alignment: Alignment | None,
) -> dict[str, bytes | None]:
    """``rewritten`` with a ``generation_config.json`` whose ends of sequence are those of the template, too.

    Args:
        rewritten: Files of the result that are otherwise than in its directories; None: left out.
        tokenizer: The checkpoint that gives the tokenizer's files.
        wanted: The recipe's ``chat_template``: a known name, ``auto``, or a text.
        template: The text that it stands for.
        parents: By reference.
        alignment: How their vocabularies become one; None: they are one.
    """
    own = _generation(rewritten, tokenizer)
    ends = _numbers(own.get(_END) if own.get(_END) is not None else tokenizer.config.get(_END))
    if alignment is not None and GENERATION not in rewritten:  # the model's own ids, before rows moved
        ends = _moved(ends, _reference_of(tokenizer, parents), alignment)
    more = [
        *_known_end(wanted, tokenizer, alignment),
        *(
            end
            for name, parent in parents.items()
            if parent.chat_template == template
            for end in _moved(_ends_of(parent), name, alignment)
        ),
    ]
    if not ends or set(more) <= set(ends):  # Without any there is nothing that one could add to.
        return dict(rewritten)
    content = {**own, _END: list(dict.fromkeys((*ends, *more)))}
    return {**rewritten, GENERATION: config_bytes(content)}


def _generation(rewritten: Mapping[str, bytes | None], checkpoint: Checkpoint) -> Mapping[str, Any]:
    if content := rewritten.get(GENERATION):
        return dict(json.loads(content))
    if GENERATION in rewritten or GENERATION not in checkpoint.companions:
        return {}
    return read_json(checkpoint.directory / GENERATION)


def _ends_of(parent: Checkpoint) -> Sequence[int]:
    found = _numbers(_generation(parent.rewritten, parent).get(_END))
    return found or _numbers(parent.config.get(_END))


def _moved(ends: Sequence[int], name: str | None, alignment: Alignment | None) -> list[int]:
    """Each end as the id that its token has in the result."""
    if alignment is None or name is None:
        return list(ends)
    before = {number: token for token, number in alignment.vocabularies[name].ids.items()}
    moved, _ = follow_tokens({_END: list(ends)}, before, alignment.ids)
    return _numbers(moved[_END])


def _reference_of(tokenizer: Checkpoint, parents: Mapping[str, Checkpoint]) -> str | None:
    return next((name for name, parent in parents.items() if parent.directory == tokenizer.directory), None)


def _known_end(wanted: str, tokenizer: Checkpoint, alignment: Alignment | None) -> Iterator[int]:
    """The token that ends a turn in a format known by name, where the vocabulary has it."""
    if wanted not in TURN_ENDS:
        return
    vocabulary = read_vocabulary(tokenizer.directory) if alignment is None else None
    ids = alignment.ids if alignment is not None else vocabulary.ids if vocabulary is not None else {}
    if TURN_ENDS[wanted] in ids:
        yield ids[TURN_ENDS[wanted]]


def _numbers(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one >= 0]
