"""Build the metadata of the model card, and verify before publication that the Hub will read it as intended.

Sources: https://huggingface.co/docs/hub/model-cards (fields; ``base_model`` accepts only ids of the Hub) and the model
index of papers-with-code, which the Hub still reads. Scores in [0, 1] are given in percent, as on the Hub's
leaderboards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import yaml

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints import PinnedCheckpoint, read_card
from mergegate.tasks.evaluation import TaskScore
from mergegate.tasks.preflight.licenses import Combination
from mergegate.tasks.publish.content import CARD
from mergegate.tasks.publish.eval_results import BENCHMARKS
from mergegate.tasks.publish.provenance import hub_id
from mergegate.tasks.report import ReportContent

CardMetadata = Mapping[str, object]

# For each metric of lm-eval: its id on the Hub, and its name for people.
_METRICS = {
    "acc": ("accuracy", "accuracy"),
    "acc_norm": ("acc_norm", "normalized accuracy"),
    "exact_match": ("exact_match", "exact match"),
    "f1": ("f1", "F1"),
    "word_perplexity": ("perplexity", "word perplexity"),
}


def card_metadata(
    content: ReportContent, parents: Sequence[PinnedCheckpoint], license: Combination, *, is_adapter: bool = False
) -> dict[str, object]:
    """Return the YAML front matter of the card as plain data.

    ``is_adapter`` means that the release is an adapter of the parents' common base model.
    """
    metadata = _license_and_language(parents, license)
    library, tags = ("peft", ["lora"]) if is_adapter else ("transformers", list[str]())
    metadata |= {"library_name": library, "pipeline_tag": "text-generation", "tags": [*tags, "merge", "mergegate"]}
    # The Hub accepts only its own ids as base_model and rejects local paths.
    if hub := list(dict.fromkeys(hub_id(parent) for parent in parents if parent.revision is not None)):
        # For adapters, the id of each parent is that of their common base model.
        metadata |= {"base_model": hub, "base_model_relation": "adapter" if is_adapter else "merge"}
    scores = next(model for model in content.models if model.role == "merge").scores
    # One entry per dataset: the Hub's library merges all metrics of a dataset, even under different names.
    by_dataset: dict[str, list[TaskScore]] = {}
    for score in scores.tasks if scores else ():
        benchmark = BENCHMARKS.get(score.task)
        by_dataset.setdefault(benchmark.dataset if benchmark else score.task, []).append(score)
    results = []
    for dataset, dataset_scores in by_dataset.items():
        name, metrics = dataset_scores[0].task, []
        for score in dataset_scores:
            metric, _, variant = score.metric.partition(",")
            kind, label = _METRICS.get(metric, (metric, metric.replace("_", " ")))
            detail = ", ".join([score.task] * (score.task != name) + [variant] * (variant not in ("", "none")))
            in_percent = score.higher_is_better and 0 <= score.score <= 1
            value = round(100 * score.score, 2) if in_percent else round(score.score, 4)
            metrics.append({"type": kind, "value": value, "name": f"{label} ({detail})" if detail else label})
        task = {"type": "text-generation", "name": "Text Generation"}
        results.append({"task": task, "dataset": {"name": name, "type": dataset}, "metrics": metrics})
    if results:
        metadata["model-index"] = [{"name": content.name, "results": results}]
    return metadata


def variant_metadata(
    parents: Sequence[PinnedCheckpoint], license: Combination, base_model: str | None, library: str, tags: Sequence[str]
) -> dict[str, object]:
    """Return the YAML front matter of the card of quantized variants.

    ``base_model`` is the id of the merge's repository on the Hub, or None if it is not on the Hub. ``library`` loads
    the variants. ``tags`` names their format and types.
    """
    metadata = _license_and_language(parents, license)
    metadata |= {"library_name": library, "pipeline_tag": "text-generation"}
    metadata["tags"] = list(dict.fromkeys((*tags, "quantized", "merge", "mergegate")))
    if base_model:
        metadata |= {"base_model": [base_model], "base_model_relation": "quantized"}
    return metadata


def _license_and_language(parents: Sequence[PinnedCheckpoint], license: Combination) -> dict[str, object]:
    metadata: dict[str, object] = {**license.card}
    languages = set()
    for parent in parents:
        value = read_card(parent.directory).metadata.get("language")
        words = value if isinstance(value, list) else [value]
        codes = {word for word in words if isinstance(word, str) and re.fullmatch(r"[a-z]{2,3}", word)}
        languages.add(tuple(sorted(codes)))
    if len(languages) == 1 and (common := languages.pop()):  # the parents' cards agree
        metadata["language"] = list(common)
    return metadata


def check_card(card: str, metadata: CardMetadata, names: Collection[str]) -> None:
    """Verify, without contacting the Hub, that a card reads as intended.

    Args:
        card: Content of README.md.
        metadata: Metadata that the card must contain.
        names: Names of the other files of the release.

    Raises:
        Refused: The Hub's own library reads different metadata, an id is invalid, or a license file is missing.
    """
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in the types

    problem = ""
    try:
        parsed = ModelCard(card).data.to_dict()  # type: ignore[no-untyped-call]  # the library has no type for it
        if differences := sorted(name for name in {*parsed, *metadata} if parsed.get(name) != metadata.get(name)):
            name = differences[0]
            problem = f"the Hub's library reads {name} as {parsed.get(name)!r} instead of {metadata.get(name)!r}"
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        problem = f"the metadata cannot be read: {error}"
    base = metadata.get("base_model", [])
    for model in map(str, base if isinstance(base, list) else [base]):
        try:
            validate_repo_id(model)
        except HFValidationError:
            problem = problem or f"base_model: {model!r} is not an id on the Hub"
    link = str(metadata.get("license_link", ""))
    if not metadata.get("license"):
        problem = problem or "the license is missing"
    elif metadata["license"] == "other" and not metadata.get("license_name"):
        problem = problem or "license: other, without a license_name"
    elif link and "://" not in link and link not in names:
        problem = problem or f"license_link: {link!r} is not a file of the release"
    if problem:
        raise Refused(
            CARD,
            found=problem,
            expected="a model card that the Hub reads as intended",
            remedy="correct the profile's name or the cards of the parents, then run again; nothing was uploaded",
        )
