"""Compare the tokenizers of the merged models, and set the tokens that end an answer of the result.

If the recipe has no ``tokenizer``, every model must have the donor's tokenizer. A difference that changes the ids of a
text blocks the merge; other differences are warnings. If the recipe has ``tokenizer``, rows are matched by token, and
only the way text is split into tokens can still differ. The recipe accepts that, so it never blocks.

A merge with the ``generation_config.json`` of a base would answer as its fine-tuned models do and then continue talking
to itself. mergegate therefore adds the end tokens of all models to those of the result. If the recipe chooses a chat
template, it adds only the end tokens of that template, because a template and its end tokens belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import DEFAULT, TURN_ENDS, ChatTemplates, Checkpoint, Companions
from mergegate.merge_core.checkpoint.vocabulary import (
    SpellingDifference,
    TokenizerDefinition,
    Vocabulary,
    compare_tokenizers,
    read_settings,
    read_tokenizer,
    read_vocabulary,
    settings_differences,
    vocabulary_differences,
)
from mergegate.merge_core.errors import Finding, InvalidInput, finding_of
from mergegate.merge_core.plan.alignment import Alignment, align, follow_tokens
from mergegate.merge_core.plan.companions import tokenizer_donor
from mergegate.merge_core.plan.consistency import config_value
from mergegate.merge_core.plan.file_settings import GENERATION, serialize_config
from mergegate.merge_core.recipe import Recipe

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


@dataclass(frozen=True)
class TokenizerPair:
    """Two tokenizers that may split text differently."""

    # Finding that reports the difference. A later check adds the measured share of a sample text to it.
    finding: Finding
    original: Mapping[str, Any]  # content of ``tokenizer.json`` of the model before the merge
    result: Mapping[str, Any]  # content of ``tokenizer.json`` of the result
    model: str  # reference of the model, for messages


def compare_to_donor(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], accepted_differences: frozenset[str]
) -> tuple[list[Finding], list[TokenizerPair]]:
    """Compare every model's tokenizer with the result's tokenizer, and return the pairs of tokenizers that differ."""
    donor = tokenizer_donor(recipe, checkpoints)
    if recipe.output is not None:  # An adapter refers to the rows of its base, which has the tokens of all adapters.
        merged = {str(source.model) for source in recipe.sources}
        checkpoints = {name: checkpoints[name] for name in checkpoints if name in merged}
        accepted_differences |= {"vocabulary"}
    try:
        ends = [finding for name, model in checkpoints.items() for finding in end_token_findings(name, model)]
        if recipe.tokenizer is not None:
            findings, pairs = _compare_aligned(recipe, checkpoints, donor, accepted_differences)
        else:
            findings, pairs = _compare_files(donor, checkpoints, accepted_differences)
        return [*ends, *findings], pairs
    except InvalidInput as error:
        return [finding_of(error)], []


def _compare_files(
    donor: str, checkpoints: Mapping[str, Checkpoint], accepted_differences: frozenset[str]
) -> tuple[list[Finding], list[TokenizerPair]]:
    definitions = {name: read_tokenizer(checkpoint.companions) for name, checkpoint in checkpoints.items()}
    vocabularies = {name: read_vocabulary(checkpoint.companions) for name, checkpoint in checkpoints.items()}
    reference, first = vocabularies[donor], definitions[donor]
    findings: list[Finding] = []
    pairs: list[TokenizerPair] = []
    if reference is None:
        holder = next((name for name, vocabulary in vocabularies.items() if vocabulary is not None), None)
        if holder is not None:
            finding = Finding(
                "block",
                donor,
                found="no tokenizer",
                expected=f"a tokenizer: the result gets that of {donor}, and {holder} has one",
                remedy=f"copy the tokenizer files of {holder} into {donor}, or use another base_model",
            )
            findings.append(finding)
        return findings, pairs
    if first is not None:
        findings += _misnumbered_findings(donor, first)
    for name, vocabulary in vocabularies.items():
        if name == donor:
            continue
        definition, differences = definitions[name], list[SpellingDifference]()
        own_findings = list(_vocabulary_findings(donor, reference, name, vocabulary, accepted_differences))
        if first is not None and definition is not None:
            own_findings += _misnumbered_findings(name, definition)
            differences += compare_tokenizers(first, definition)
        elif vocabulary is not None:
            settings = [read_settings(checkpoints[key].companions) for key in (donor, name)]
            differences += settings_differences(*settings)
        for difference in differences:
            own_findings.append(_difference_finding(difference, donor, name, accepted_differences, decided=False))
        findings += own_findings
        # Only tokenizers with a pipeline can run on a sample text, which measures the difference.
        if first is not None and definition is not None and first.has_pipeline and definition.has_pipeline:
            for finding in own_findings:
                if finding.severity == "block" or any(f": {key}" in finding.where for key in accepted_differences):
                    pairs.append(TokenizerPair(finding, definition.content, first.content, name))
                    break
    return findings, pairs


def _compare_aligned(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], donor: str, accepted_differences: frozenset[str]
) -> tuple[list[Finding], list[TokenizerPair]]:
    findings: list[Finding] = []
    pairs: list[TokenizerPair] = []
    try:
        alignment = align(recipe, checkpoints, donor)
    except InvalidInput:  # Planning reports it.
        return findings, pairs
    assert alignment is not None
    target = alignment.vocabularies[alignment.tokenizer_name]
    for name in filter(alignment.vocabularies.__contains__, checkpoints):
        definition, cause = alignment.vocabularies[name], None
        findings += _misnumbered_findings(name, definition)
        if name != alignment.tokenizer_name:
            for difference in compare_tokenizers(target, definition):
                findings.append(
                    _difference_finding(difference, alignment.tokenizer_name, name, accepted_differences, decided=True)
                )
                if difference.changes_ids:
                    cause = cause or findings[-1]
        elif alignment.model_changed:
            cause = Finding(
                "warn",
                f"{name}: tokenizer.json",
                found=f"{len(alignment.ids) - len(definition.ids)} more tokens in the result "
                f"({alignment.choice.strangers})",
                expected="the tokenizer that the model was trained with",
                remedy="check how many texts are split differently; strangers: specials changes no text",
            )
            findings.append(cause)
        if cause is not None and target.has_pipeline and definition.has_pipeline:
            pairs.append(TokenizerPair(cause, definition.content, alignment.content, name))
    return findings, pairs


def _difference_finding(
    difference: SpellingDifference, donor: str, name: str, accepted_differences: frozenset[str], *, decided: bool
) -> Finding:
    changes = difference.changes_ids and not decided
    return Finding(
        "info" if difference.key in accepted_differences else "block" if changes else "warn",
        f"{name}: {difference.file}: {difference.key}",
        found=difference.found,
        expected=f"{difference.expected}, as in {donor}, whose tokenizer the result gets",
        remedy=(
            "merge models that split text in the same way, set tokenizer_source in the recipe, or accept the "
            f"difference in the profile: checks.tokenizer.accepted: [{difference.key}]"
            if changes
            else "check that the difference does not matter, then accept it in the profile: "
            f"checks.tokenizer.accepted: [{difference.key}]"
        ),
    )


def _misnumbered_findings(name: str, definition: TokenizerDefinition) -> Iterator[Finding]:
    if definition.misnumbered:
        token = definition.misnumbered[0]
        yield Finding(
            "warn",
            f"{name}: {PurePath(definition.location).name}: added_tokens",
            found=f"the library assigns different ids to {len(definition.misnumbered)} tokens, such as {token!r}",
            expected=f"{definition.ids[token]} for {token!r}, because an added token gets the next free id",
            remedy="save the tokenizer again; mergegate uses the ids that the library assigns",
        )


def _vocabulary_findings(
    donor: str, reference: Vocabulary, name: str, vocabulary: Vocabulary | None, accepted_differences: frozenset[str]
) -> Iterator[Finding]:
    if vocabulary is None:
        yield Finding(
            "warn",
            name,
            found="no tokenizer",
            expected=f"the tokenizer of {donor}",
            remedy="make sure that the model was trained with that tokenizer",
        )
        return
    shared = sorted(reference.digests.keys() & vocabulary.digests.keys())
    differing = [file for file in shared if reference.digests[file] != vocabulary.digests[file]]
    if reference.is_complete and vocabulary.is_complete:
        if differing:
            yield Finding(
                "warn",
                f"{name}: {differing[0]}",
                found=f"the file differs from that of {donor}; mergegate did not compare its tokens",
                expected="one vocabulary in all files",
                remedy=f"check that {differing[0]} of {donor}, which the result gets, is suitable",
            )
    elif differing:
        yield Finding(
            "block",
            f"{name}: {differing[0]}",
            found=f"the vocabulary differs from {donor}: the files differ, and mergegate cannot compare tokens",
            expected="the same token for each row of the embeddings",
            remedy="save both tokenizers as tokenizer.json (a fast tokenizer), and set tokenizer_source in the "
            "recipe, which reorders the rows by token",
        )
        return
    elif not shared:
        files, first_files = (
            ", ".join(sorted(item.digests)) or "tokenizer.json or vocab.json" for item in (vocabulary, reference)
        )
        yield Finding(
            "warn",
            f"{name}: tokenizer",
            found=f"{files}: mergegate cannot compare the vocabulary with {first_files} of {donor}",
            expected="files of the same kind in both models",
            remedy="save both tokenizers as tokenizer.json (a fast tokenizer)",
        )
        return
    moved, missing, extra = vocabulary_differences(reference, vocabulary)
    file = "tokenizer.json" if vocabulary.is_complete else "tokenizer"
    if moved:
        yield Finding(
            "block",
            f"{name}: {file}",
            found=f"{len(moved)} tokens have different ids in {donor}: {_examples(moved)}",
            expected="the same token for each row of the embeddings",
            remedy="set tokenizer_source in the recipe, which reorders the rows by token; without it, the result "
            "generates garbled text",
        )
    elif missing or extra:
        examples = _examples(extra or missing)
        yield Finding(
            "info" if "vocabulary" in accepted_differences else "block",
            f"{name}: {file}",
            found=f"{len(extra)} tokens are not in {donor}, and {len(missing)} of its tokens are not here: {examples}",
            expected="one vocabulary",
            remedy=f"set tokenizer_source in the recipe (union keeps all tokens, base those of {donor}), or accept it "
            "in the profile: checks.tokenizer.accepted: [vocabulary]",
        )


def _examples(tokens: list[str]) -> str:
    examples = ", ".join(repr(token) for token in tokens[:3])
    return examples + (", ..." if len(tokens) > 3 else "")
