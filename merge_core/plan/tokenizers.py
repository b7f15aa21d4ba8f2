"""Compare the tokenizers of the merged models and report the differences.

If the recipe has no ``tokenizer``, every model must have the donor's tokenizer. A difference that changes the ids of a
text blocks the merge; other differences are warnings. If the recipe has ``tokenizer``, rows are matched by token, and
only the way text is split into tokens can still differ. The recipe accepts that, so it never blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from mergegate.merge_core.checkpoint import Checkpoint
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
from mergegate.merge_core.plan.alignment import align
from mergegate.merge_core.plan.companions import tokenizer_donor
from mergegate.merge_core.plan.turn_ends import end_token_findings
from mergegate.merge_core.recipe import Recipe


@dataclass(frozen=True)
class TokenizerPair:
    """Two tokenizers that may split text differently.

    Args:
        finding: Finding that reports the difference. A later check adds the measured share of a sample text to it.
        original: Content of ``tokenizer.json`` of the model before the merge.
        result: Content of ``tokenizer.json`` of the result.
        model: Reference of the model, for messages.
    """

    finding: Finding
    original: Mapping[str, Any]
    result: Mapping[str, Any]
    model: str


@dataclass(frozen=True)
class ComparedTokenizers:
    """Findings about the tokenizers of one recipe document, and the pairs of tokenizers that differ."""

    findings: tuple[Finding, ...]
    pairs: tuple[TokenizerPair, ...]


def compare_to_donor(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], accepted_differences: frozenset[str]
) -> ComparedTokenizers:
    """Compare every model's tokenizer with the result's tokenizer."""
    donor = tokenizer_donor(recipe, checkpoints)
    if recipe.output is not None:  # An adapter refers to the rows of its base, which has the tokens of all adapters.
        merged = {str(source.model) for source in recipe.sources}
        checkpoints, accepted_differences = (
            {name: checkpoints[name] for name in checkpoints if name in merged},
            accepted_differences | {"vocabulary"},
        )
    try:
        ends = [finding for name, model in checkpoints.items() for finding in end_token_findings(name, model)]
        if recipe.tokenizer is not None:
            compared = _compare_aligned(recipe, checkpoints, donor, accepted_differences)
        else:
            compared = _compare_files(donor, checkpoints, accepted_differences)
        return replace(compared, findings=(*ends, *compared.findings))
    except InvalidInput as error:
        return ComparedTokenizers((finding_of(error),), ())


def _compare_files(
    donor: str, checkpoints: Mapping[str, Checkpoint], accepted_differences: frozenset[str]
) -> ComparedTokenizers:
    definitions = {name: read_tokenizer(checkpoint.companions) for name, checkpoint in checkpoints.items()}
    vocabularies = {name: read_vocabulary(checkpoint.companions) for name, checkpoint in checkpoints.items()}
    reference = vocabularies[donor]
    findings: list[Finding] = []
    pairs: list[TokenizerPair] = []
    if reference is None:
        with_tokenizer = [name for name, vocabulary in vocabularies.items() if vocabulary is not None]
        if with_tokenizer:
            findings.append(
                Finding(
                    "block",
                    donor,
                    found="no tokenizer",
                    expected=f"a tokenizer: the result gets that of {donor}, and {with_tokenizer[0]} has one",
                    remedy=f"copy the tokenizer files of {with_tokenizer[0]} into {donor}, or use another base_model",
                )
            )
        return ComparedTokenizers(tuple(findings), ())
    first = definitions[donor]
    if first is not None:
        findings += _misnumbered_findings(donor, first)
    for name, vocabulary in vocabularies.items():
        if name == donor:
            continue
        model_findings = list(_vocabulary_findings(donor, reference, name, vocabulary, accepted_differences))
        definition = definitions[name]
        if first is None or definition is None:
            if vocabulary is not None:
                settings = [read_settings(checkpoints[key].companions) for key in (donor, name)]
                model_findings += [
                    _difference_finding(difference, donor, name, accepted_differences, decided=False)
                    for difference in settings_differences(*settings)
                ]
            findings += model_findings
            continue
        model_findings += _misnumbered_findings(name, definition)
        for difference in compare_tokenizers(first, definition):
            model_findings.append(_difference_finding(difference, donor, name, accepted_differences, decided=False))
        findings += model_findings
        relevant = [
            finding
            for finding in model_findings
            if finding.severity == "block" or any(f": {key}" in finding.where for key in accepted_differences)
        ]
        # Only tokenizers with a pipeline can run on a sample text, which measures the difference.
        if relevant and first.has_pipeline and definition.has_pipeline:
            pairs.append(TokenizerPair(relevant[0], definition.content, first.content, name))
    return ComparedTokenizers(tuple(findings), tuple(pairs))


def _compare_aligned(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], donor: str, accepted_differences: frozenset[str]
) -> ComparedTokenizers:
    try:
        alignment = align(recipe, checkpoints, donor)
    except InvalidInput:  # Planning reports it.
        return ComparedTokenizers((), ())
    assert alignment is not None
    content = alignment.content
    target = alignment.vocabularies[alignment.tokenizer_name]
    findings: list[Finding] = []
    pairs: list[TokenizerPair] = []
    for name in checkpoints:
        if name not in alignment.vocabularies:
            continue
        definition = alignment.vocabularies[name]
        findings += _misnumbered_findings(name, definition)
        if name != alignment.tokenizer_name:
            relevant = []
            for difference in compare_tokenizers(target, definition):
                finding = _difference_finding(
                    difference, alignment.tokenizer_name, name, accepted_differences, decided=True
                )
                findings.append(finding)
                if difference.changes_ids:
                    relevant.append(finding)
            if relevant and target.has_pipeline and definition.has_pipeline:
                pairs.append(TokenizerPair(relevant[0], definition.content, content, name))
        elif alignment.model_changed:
            change = Finding(
                "warn",
                f"{name}: tokenizer.json",
                found=f"{len(alignment.ids) - len(definition.ids)} more tokens in the result "
                f"({alignment.choice.strangers})",
                expected="the tokenizer that the model was trained with",
                remedy="check how many texts are split differently; strangers: specials changes no text",
            )
            findings.append(change)
            if definition.has_pipeline:
                pairs.append(TokenizerPair(change, definition.content, content, name))
    return ComparedTokenizers(tuple(findings), tuple(pairs))


def _difference_finding(
    difference: SpellingDifference, donor: str, name: str, accepted_differences: frozenset[str], *, decided: bool
) -> Finding:
    changes = difference.changes_ids and not decided
    severity = "info" if difference.key in accepted_differences else "block" if changes else "warn"
    return Finding(
        severity,  # type: ignore[arg-type]  # It is one of the three severities.
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
    else:
        if differing:
            yield Finding(
                "block",
                f"{name}: {differing[0]}",
                found=f"the vocabulary differs from {donor}: the files differ, and mergegate cannot compare tokens",
                expected="the same token for each row of the embeddings",
                remedy="save both tokenizers as tokenizer.json (a fast tokenizer), and set tokenizer_source in the "
                "recipe, which reorders the rows by token",
            )
            return
        if not shared:
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
    file = "tokenizer" if not vocabulary.is_complete else "tokenizer.json"
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
