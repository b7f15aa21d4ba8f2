"""Check that a profile judges a merge only in ways that fit its kind of model, before anything is merged."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mergegate.merge_core import Finding
from mergegate.merge_core.architecture import ModelKind, TaskForm
from mergegate.merge_core.errors import pip_command

# Ability of a model that a part of a profile needs: a type of task, or next-token prediction (``ModelKind.is_causal``).
Ability = TaskForm | Literal["next tokens"]

NEXT_TOKENS: Literal["next tokens"] = "next tokens"
_FORM_NOUNS: Mapping[TaskForm, str] = {
    "text": "text task",
    "pictures": "picture task",
    "retrieval": "retrieval task",
    "transcription": "transcription task",
}
# A guard for a form of task, as a user would write it.
EXAMPLES: Mapping[TaskForm, str] = {
    "text": "{task: gsm8k, guarded_by: best parent, max_drop: 3}",
    "pictures": "{task: questions_about_pictures.yaml, guarded_by: best parent}",
    "retrieval": "{task: {kind: retrieval, data: queries.jsonl, metric: ndcg@10}, guarded_by: best parent}",
    "transcription": "{task: {kind: transcription, data: recordings.jsonl}, guarded_by: best parent}",
}
# Package of each library that loads models and that mergegate does not require, and the extra that installs it.
_EXTRAS: Mapping[str, tuple[str, str]] = {"sentence-transformers": ("sentence_transformers", "embeddings")}


@dataclass(frozen=True)
class KindDemand:
    """A part of a profile that only some kinds of models support.

    Args:
        location: Key in the profile, such as ``evaluate.tasks: arc_easy``.
        noun: Noun for the part, with an article: ``a text task``.
        ability: Ability that the part needs.
        remedy: How to fix the profile. Default: judge the model by a task that fits.
    """

    location: str
    noun: str
    ability: Ability
    remedy: str = ""

    def fits(self, kind: ModelKind) -> bool:
        """Return whether a model of this kind has the ability."""
        return kind.is_causal if self.ability == NEXT_TOKENS else self.ability in kind.task_forms


def kind_findings(kind: ModelKind, demands: Sequence[KindDemand], model: str = "the merge") -> Iterator[Finding]:
    """Yield a blocking finding for each demand of a profile that the kind of ``model`` does not meet.

    A kind that mergegate cannot evaluate has one finding. A missing library that loads the merge is a finding too.
    """
    if not demands:
        return  # The profile only merges.
    if not kind.task_forms:
        task = f" ({kind.pipeline_tag})" if kind.pipeline_tag else ""
        yield Finding(
            "block",
            f"the kind of {model}",
            found=f"{kind.noun}{task}, which mergegate cannot evaluate",
            expected="a model that mergegate can evaluate (docs/explanation/kinds-of-models.md)",
            remedy="merge it without a verdict: mergegate merge RECIPE DIRECTORY",
            is_invalid=True,
        )
        return
    for demand in demands:
        if not demand.fits(kind):
            yield Finding(
                "block",
                demand.location,
                found=f"{demand.noun}, but {model} is {kind.noun}",
                expected=_describe_ability(kind, demand.ability),
                remedy=demand.remedy
                or f"add a guard under evaluate.tasks, for example: - {EXAMPLES[kind.task_forms[0]]}",
                cause=f"the kind of {model}",
                is_invalid=True,
            )
    package, extra = _EXTRAS.get(kind.loading_library, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        yield Finding(
            "block",
            f"the kind of {model}",
            found=f"{kind.noun}, but {kind.loading_library}, which loads it, is not installed",
            expected="the extra that evaluates such models",
            remedy=pip_command(f"mergegate[{extra}]"),
            is_invalid=True,
        )


def _describe_ability(kind: ModelKind, ability: Ability) -> str:
    if ability == NEXT_TOKENS:
        return f"a model that predicts each token from the tokens before it; this one is {describe_judging(kind)}"
    return " or ".join(f"a {_FORM_NOUNS[form]}" for form in kind.task_forms)


def describe_judging(kind: ModelKind) -> str:
    """Return how a kind of model is judged, such as ``judged by retrieval tasks``."""
    if not kind.task_forms:
        return "which mergegate merges but cannot evaluate"
    return f"judged by {' and '.join(f'{_FORM_NOUNS[form]}s' for form in kind.task_forms)}"
