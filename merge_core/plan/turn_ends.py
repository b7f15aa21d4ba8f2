"""Set the tokens that end an answer, and report models whose files contradict each other about them.

A merge with the ``generation_config.json`` of a base would answer as its fine-tuned models do and then continue talking
to itself. mergegate therefore adds the end tokens of all models to those of the result. If the recipe chooses a chat
template, it adds only the end tokens of that template, because a template and its end tokens belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import DEFAULT, TURN_ENDS, ChatTemplates, Checkpoint, Companions
from mergegate.merge_core.checkpoint.vocabulary import read_settings, read_vocabulary
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.plan.alignment import Alignment
from mergegate.merge_core.plan.finding_groups import config_value
from mergegate.merge_core.plan.special_ids import GENERATION, follow_tokens, serialize_config

_END = "eos_token_id"


def with_turn_ends(
    companions: Companions,
    tokenizer: Checkpoint,
    choice: str | None,
    templates: ChatTemplates,
    parents: Mapping[str, Checkpoint],
    alignment: Alignment | None,
) -> Companions:
    """Add the tokens at which ``parents`` end a text or a turn to the ``generation_config.json`` of the result.

    ``choice`` is the recipe's ``chat_template``: a known name, ``auto``, the text of a template, or None. If it is set,
    only parents with the result's chat template count. ``templates`` holds the result's chat templates by name. Without
    ``alignment``, all models have the same vocabulary.
    """
    if choice is None and not any(GENERATION in parent.companions for parent in parents.values()):
        return companions  # Models that generate no text, or that leave their end tokens to the configuration.
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
        if choice is None or (parent.chat_template is not None and parent.chat_template == templates.get(DEFAULT)):
            parent_ends = _token_ids((parent.companions.json(GENERATION) or {}).get(_END))
            extra_ends += _translate_ends(parent_ends or _token_ids(parent.config.get(_END)), name, alignment)
    if (choice and not ends) or set(extra_ends) <= set(ends):  # A template has no ends to extend.
        return companions
    if alignment is None and (known := read_vocabulary(tokenizer.companions)) is not None and known.is_complete:
        numbers = set(known.ids.values())  # A parent may have more tokens if the profile accepts that.
        extra_ends = [number for number in extra_ends if number in numbers]
    content = {**generation, _END: list(dict.fromkeys((*ends, *extra_ends)))}
    return companions.with_changes({GENERATION: serialize_config(content)})


def end_token_findings(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings if the files of a text generator disagree about its end tokens, or add one to each prompt.

    Software reads the end tokens from different files. ``generation_config.json`` may list more than the other files.
    """
    files, vocabulary = checkpoint.companions, read_vocabulary(checkpoint.companions)
    if vocabulary is None or kind_of(checkpoint).name not in ("text generator", "vision-language"):
        return
    settings = read_settings(files)
    if settings.get("add_eos_token") is True:
        yield Finding(
            "warn",
            f"{name}: tokenizer_config.json: add_eos_token",
            found="true, so llama.cpp and some tokenizer classes end each prompt with an end token",
            expected="false for a text generator, which would start a new text instead of an answer",
            remedy="set add_eos_token to false; training programs often leave it behind",
        )
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    declared = {
        "tokenizer_config.json": _token_ids(vocabulary.ids.get(str(token))),
        "config.json": _token_ids(config_value(checkpoint, _END)),
        GENERATION: _token_ids((files.json(GENERATION) or {}).get(_END)),
    }
    declared = {file: ends for file, ends in declared.items() if ends}
    *others, (last_file, last_ends) = declared.items() if declared else [("", [])]
    if any(not set(ends) <= set(last_ends) for _, ends in others):
        tokens = {number: text for text, number in vocabulary.ids.items()}
        values = (
            f"{file} has {', '.join(f'{number} ({tokens.get(number)!r})' for number in ends)}"
            for file, ends in declared.items()
        )
        yield Finding(
            "warn",
            f"{name}: {last_file}: {_END}",
            found=f"the files name different end tokens: {'; '.join(values)}",
            expected=f"every end token of the other files in {last_file}, because software reads different files",
            remedy="correct the file that does not have the token with which the model was trained to end a text",
        )


def _translate_ends(ends: Sequence[int], name: str | None, alignment: Alignment | None) -> list[int]:
    """Return the ids that the tokens ``ends`` of a model have in the result."""
    if alignment is None or name is None:
        return list(ends)
    moved, _ = follow_tokens({_END: list(ends)}, alignment.vocabularies[name].ids, alignment.ids)
    return _token_ids(moved[_END])


def _token_ids(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0]
