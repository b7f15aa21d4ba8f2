"""What is wrong with merging models whose tokenizers differ.

Without ``tokenizer`` in the recipe every model must have the donor's: what gives the same text other ids blocks, and
what does not is said. With it, rows follow their tokens; then what still differs is how text is cut into tokens, which
the recipe has decided, so it is said and blocks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from mergegate.merge_core.recipe import Recipe


@dataclass(frozen=True)
class CutPair:
    """Two tokenizers that may cut texts in different ways.

    Args:
        finding: Which says so; the share of a sample text is to be added to it.
        texts_of: The tokenizer that the texts were cut by before, as the content of ``tokenizer.json``.
        now: The one that cuts them in the result.
        whose: What it is the share of, for people.
    """

    finding: Finding
    texts_of: Mapping[str, Any]
    now: Mapping[str, Any]
    whose: str


@dataclass(frozen=True)
class ComparedTokenizers:
    """What is said of the tokenizers of one document of a recipe."""

    findings: tuple[Finding, ...]
    pairs: tuple[CutPair, ...]


def compare_to_donor(recipe: Recipe, own: Mapping[str, Checkpoint], accepted: frozenset[str]) -> ComparedTokenizers:
    """Compare every model's tokenizer with the one that the result gets.

    Args:
        recipe: One document.
        own: Its checkpoints, by reference.
        accepted: Keys of differences that block nothing.
    """
    donor = tokenizer_donor(recipe, own)
    if recipe.output is not None:  # An adapter speaks of the rows of its base, which has the tokens of all adapters.
        merged = {str(source.model) for source in recipe.sources}
        own, accepted = {name: own[name] for name in own if name in merged}, accepted | {"vocabulary"}
    try:
        if recipe.tokenizer is not None:
            return _aligned(recipe, own, donor, accepted)
        return _alike(donor, own, accepted)
    except InvalidInput as error:
        return ComparedTokenizers((finding_of(error),), ())


def _alike(donor: str, own: Mapping[str, Checkpoint], accepted: frozenset[str]) -> ComparedTokenizers:
    definitions = {name: read_tokenizer(checkpoint.companions) for name, checkpoint in own.items()}
    vocabularies = {name: read_vocabulary(checkpoint.companions) for name, checkpoint in own.items()}
    reference = vocabularies[donor]
    findings: list[Finding] = []
    pairs: list[CutPair] = []
    if reference is None:
        others = [name for name, vocabulary in vocabularies.items() if vocabulary is not None]
        if others:
            findings.append(
                Finding(
                    "block",
                    donor,
                    found="no tokenizer",
                    expected=f"one: the result gets its tokenizer from {donor}, and {others[0]} has one",
                    remedy=f"copy the tokenizer files of {others[0]} into {donor}, or name another base_model",
                )
            )
        return ComparedTokenizers(tuple(findings), ())
    first = definitions[donor]
    if first is not None:
        findings += _misnumbered(donor, first)
    for name, vocabulary in vocabularies.items():
        if name == donor:
            continue
        said = list(_vocabulary_findings(donor, reference, name, vocabulary, accepted))
        other = definitions[name]
        if first is None or other is None:
            if vocabulary is not None:
                settings = [read_settings(own[one].companions) for one in (donor, name)]
                said += [_said(one, donor, name, accepted, decided=False) for one in settings_differences(*settings)]
            findings += said
            continue
        said += _misnumbered(name, other)
        for difference in compare_tokenizers(first, other):
            said.append(_said(difference, donor, name, accepted, decided=False))
        findings += said
        cut = [one for one in said if one.severity == "block" or any(f": {key}" in one.where for key in accepted)]
        if cut and first.has_pipeline and other.has_pipeline:  # Else the library knows no more than the files say.
            pairs.append(CutPair(cut[0], other.content, first.content, name))
    return ComparedTokenizers(tuple(findings), tuple(pairs))


def _aligned(recipe: Recipe, own: Mapping[str, Checkpoint], donor: str, accepted: frozenset[str]) -> ComparedTokenizers:
    try:
        alignment = align(recipe, own, donor)
    except InvalidInput:  # Said where the plan is made.
        return ComparedTokenizers((), ())
    assert alignment is not None
    content = alignment.content
    target = alignment.vocabularies[alignment.wanted]
    findings: list[Finding] = []
    pairs: list[CutPair] = []
    for name in own:
        if name not in alignment.vocabularies:
            continue
        other = alignment.vocabularies[name]
        findings += _misnumbered(name, other)
        if name != alignment.wanted:
            said = [
                _said(one, alignment.wanted, name, accepted, decided=True) for one in compare_tokenizers(target, other)
            ]
            ways = [one for one, two in zip(said, compare_tokenizers(target, other), strict=True) if two.changes_ids]
            findings += said
            if ways and target.has_pipeline and other.has_pipeline:
                pairs.append(CutPair(ways[0], other.content, content, name))
        elif alignment.model_changed:
            own_said = Finding(
                "warn",
                f"{name}: tokenizer.json",
                found=f"{len(alignment.ids) - len(other.ids)} tokens more in the result, {alignment.choice.strangers}",
                expected="the tokenizer that the model was trained with",
                remedy="see how many texts are cut in another way; strangers: specials changes none",
            )
            findings.append(own_said)
            if other.has_pipeline:
                pairs.append(CutPair(own_said, other.content, content, name))
    return ComparedTokenizers(tuple(findings), tuple(pairs))


def _said(difference: SpellingDifference, donor: str, name: str, accepted: frozenset[str], *, decided: bool) -> Finding:
    changes = difference.changes_ids and not decided
    severity = "info" if difference.key in accepted else "block" if changes else "warn"
    return Finding(
        severity,  # type: ignore[arg-type]  # one of the three
        f"{name}: {difference.file}: {difference.key}",
        found=difference.found,
        expected=f"{difference.expected}, as in {donor}, whose tokenizer the result gets",
        remedy=(
            "merge models that cut text alike; or say tokenizer_source in the recipe, or accept it in the profile: "
            f"checks.tokenizer.accepted: [{difference.key}]"
            if changes
            else f"see that it does not matter; a profile accepts it: checks.tokenizer.accepted: [{difference.key}]"
        ),
    )


def _misnumbered(name: str, definition: TokenizerDefinition) -> Iterator[Finding]:
    if definition.misnumbered:
        token = definition.misnumbered[0]
        yield Finding(
            "warn",
            f"{name}: {PurePath(definition.where).name}: added_tokens",
            found=f"{len(definition.misnumbered)} ids that are not given so, such as that of {token!r}",
            expected=f"{definition.ids[token]} for {token!r}: an added token has the id after the last one",
            remedy="save the tokenizer again; here the id that the library gives counts",
        )


def _vocabulary_findings(
    donor: str, reference: Vocabulary, name: str, other: Vocabulary | None, accepted: frozenset[str]
) -> Iterator[Finding]:
    if other is None:
        yield Finding(
            "warn",
            name,
            found="no tokenizer",
            expected=f"the same as {donor}",
            remedy="make sure that it was trained with that tokenizer",
        )
        return
    shared = sorted(reference.digests.keys() & other.digests.keys())
    differing = [file for file in shared if reference.digests[file] != other.digests[file]]
    if reference.is_complete and other.is_complete:
        if differing:
            yield Finding(
                "warn",
                f"{name}: {differing[0]}",
                found=f"another file than in {donor}; which tokens differ in it was not compared",
                expected="one vocabulary for every library that reads one of the files",
                remedy=f"check that {differing[0]} of {donor}, which the result gets, is right for it",
            )
    else:
        if differing:
            yield Finding(
                "block",
                f"{name}: {differing[0]}",
                found=f"another vocabulary than in {donor}: the files differ, and which tokens differ was not compared",
                expected="one meaning for every row of the embeddings",
                remedy="save both tokenizers as tokenizer.json (a fast tokenizer), and say tokenizer_source in the "
                "recipe, so that rows follow their tokens",
            )
            return
        if not shared:
            files, first_files = (
                ", ".join(sorted(one.digests)) or "tokenizer.json or vocab.json" for one in (other, reference)
            )
            yield Finding(
                "warn",
                f"{name}: tokenizer",
                found=f"{files}: the vocabulary was not compared with {first_files} of {donor}",
                expected="files of one kind, which can be compared",
                remedy="save both tokenizers as tokenizer.json (a fast tokenizer)",
            )
            return
    moved, missing, extra = vocabulary_differences(reference, other)
    file = "tokenizer" if not other.is_complete else "tokenizer.json"
    if moved:
        yield Finding(
            "block",
            f"{name}: {file}",
            found=f"{len(moved)} tokens with another id than in {donor}: {_some(moved)}",
            expected="one meaning for every row of the embeddings",
            remedy="say tokenizer_source in the recipe, so that rows follow their tokens: otherwise the result is "
            "silently garbled",
        )
    elif missing or extra:
        listed = _some(extra or missing)
        yield Finding(
            "info" if "vocabulary" in accepted else "block",
            f"{name}: {file}",
            found=f"{len(extra)} tokens that {donor} lacks, {len(missing)} that it lacks itself: {listed}",
            expected="one vocabulary",
            remedy=f"say tokenizer_source in the recipe: union keeps all of them, base those of {donor}; or accept it "
            "in the profile: checks.tokenizer.accepted: [vocabulary]",
        )


def _some(tokens: list[str]) -> str:
    shown = ", ".join(repr(token) for token in tokens[:3])
    return shown + (", ..." if len(tokens) > 3 else "")
