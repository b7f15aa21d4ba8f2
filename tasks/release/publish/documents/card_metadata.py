"""Build the metadata of the model card and the scores for leaderboards, as the Hub reads them.

Sources: https://huggingface.co/docs/hub/model-cards (fields; ``base_model`` accepts only ids of the Hub), the model
index of papers-with-code, which the Hub still reads, and ``pipelines.ts`` in huggingface.js (names of tasks). Scores in
[0, 1] are given in percent, as on the Hub's leaderboards.

``.eval_results/NAME.yaml`` has scores for a leaderboard, which compares models on a complete benchmark under one
metric, with values in percent. Scores from a sample of the documents, under another metric, or on data that is not the
benchmark's own dataset at a known commit are not written. ``BENCHMARKS`` maps tasks to benchmarks. Scores of other
tasks appear only in the model index of the card. An entry has the revision of the dataset that was loaded, a source and
notes, which are optional. It has no ``date``, because a release contains none. The Hub then shows the date of the
commit. It has no ``verifyToken``, because only the Hub issues one, for evaluations that ran in its own jobs.

Sources: https://huggingface.co/docs/hub/eval-results; the ``eval.yaml`` of each dataset (ids of its tasks).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import yaml

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import ModelKind, kind_of_directory
from mergegate.merge_core.errors import Refused
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, card_directory, read_card
from mergegate.tasks.preflight.licenses import Combination
from mergegate.tasks.quality.evaluation import Scores, TaskScore
from mergegate.tasks.release.publish.content import CARD, EVAL_RESULTS
from mergegate.tasks.release.publish.documents.facts import hub_id
from mergegate.tasks.release.report import ReportContent, wording

CardMetadata = Mapping[str, object]
# For each metric of lm-eval: its id on the Hub, and its name for people.
_METRICS = {
    "acc": ("accuracy", "accuracy"),
    "acc_norm": ("acc_norm", "normalized accuracy"),
    "exact_match": ("exact_match", "exact match"),
    "f1": ("f1", "F1"),
    "word_perplexity": ("perplexity", "word perplexity"),
}
_RELATIONS = ("adapter", "finetune", "merge", "quantized")  # values of base_model_relation on the Hub
# Names for people of the tasks that mergegate scores models on.
TASK_NAMES = {
    "any-to-any": "Any-to-Any",
    "audio-text-to-text": "Audio-Text-to-Text",
    "automatic-speech-recognition": "Automatic Speech Recognition",
    "feature-extraction": "Feature Extraction",
    "image-text-to-text": "Image-Text-to-Text",
    "sentence-similarity": "Sentence Similarity",
    "text-classification": "Text Classification",
    "text-generation": "Text Generation",
    "text-ranking": "Text Ranking",
    "text2text-generation": "Text2Text Generation",
}
# Tags by which people find models of sentence-transformers, as this library writes them. They depend on the loader.
_LIBRARY_TAGS = {
    "SentenceTransformer": ("sentence-transformers", "sentence-similarity", "feature-extraction"),
    "SparseEncoder": ("sentence-transformers", "sparse-encoder", "sparse"),
    "CrossEncoder": ("sentence-transformers", "cross-encoder", "reranker"),
}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is registered on the Hub, as an lm-eval task evaluates it."""

    dataset: str  # its id on the Hub
    task_id: str  # id in the dataset's eval.yaml
    metric: str  # lm-eval's name of the metric that the leaderboard uses
    documents: int  # number of documents in the complete benchmark
    revision: str = ""  # commit of the dataset that was loaded, of a benchmark that was evaluated


_GSM8K = Benchmark("openai/gsm8k", "gsm8k", "exact_match,flexible-extract", 1319)
_GPQA = Benchmark("Idavidrein/gpqa", "diamond", "exact_match,flexible-extract", 198)
BENCHMARKS: dict[str, Benchmark] = {
    # The prompts differ, which the notes of an entry tell. Documents and metric are the same.
    "gsm8k": _GSM8K,
    "gsm8k_cot": _GSM8K,
    "gsm8k_cot_zeroshot": _GSM8K,
    "gsm8k_cot_llama": _GSM8K,
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "mmlu_pro", "exact_match,custom-extract", 12032),
    "gpqa_diamond_cot_zeroshot": _GPQA,
    "gpqa_diamond_cot_n_shot": _GPQA,
    "gpqa_diamond_generative_n_shot": _GPQA,
}


def evaluated_benchmark(scores: Scores | None, task: str) -> Benchmark | None:
    """Return the benchmark that ``task`` evaluated, or None if not all of its data is the benchmark's own dataset.

    A task with the name of a registered one can have any data. The commit of the dataset must be known.
    """
    benchmark, data = BENCHMARKS.get(task), scores.data.get(task) if scores else None
    sources = {(source.path, source.revision, tuple(source.data_files)) for source in data.sources} if data else set()
    if benchmark is None or len(sources) != 1:
        return None
    ((path, revision, files),) = sources
    is_own = path == benchmark.dataset and not files and re.fullmatch(r"[0-9a-f]{40}", revision)
    return replace(benchmark, revision=revision) if is_own else None


def eval_results(content: ReportContent, hub_id: str | None = None, version: str | None = None) -> dict[str, str]:
    """Return the content of each YAML file, by name. Empty if no registered benchmark was evaluated completely.

    On the Hub, the source of an entry is the evidence in the release in the repository ``hub_id``: under the tag of its
    ``version``, or on ``main`` if the version follows from the content, which includes these files. Default: the
    entries have no source.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    files: dict[str, str] = {}
    scores = next(model for model in content.models if model.role == "merge").scores
    for score in scores.tasks if scores else ():
        benchmark = evaluated_benchmark(scores, score.task)
        if benchmark is None or (score.metric, score.n) != (benchmark.metric, benchmark.documents):
            continue
        # How the score was measured, by whom, and its standard error.
        library, scoring = scores.lm_eval_version if scores else "", content.scoring
        notes = [f"lm-eval {library}, task {score.task}, {score.metric}, {score.n} documents"]
        if scoring is not None:
            shots = "few-shot setting of the task" if scoring.num_fewshot is None else f"{scoring.num_fewshot}-shot"
            template = "with" if scoring.chat_template else "without"
            notes.append(f"{shots}, {template} chat template, {scoring.dtype}, backend {scoring.backend}")
        if settings := content.asked.get(score.task):
            notes.append(f"task settings: {settings}")
        error = f"standard error {100 * score.stderr:.2f}"
        notes.append(f"{error}; measured by the publisher with mergegate before release")
        source: dict[str, str] = {}
        if hub_id:
            url = f"https://huggingface.co/{hub_id}/tree/{quote(version or 'main', safe='')}/evidence"
            source = {"source_url": url, "source_name": "Outcomes of all documents"}
        entry = EvalResultEntry(
            dataset_id=benchmark.dataset,
            task_id=benchmark.task_id,
            value=round(100 * score.score, 2),
            dataset_revision=benchmark.revision,
            notes="; ".join(notes),
            **source,
        )
        name = f"{EVAL_RESULTS}{benchmark.dataset.rpartition('/')[2].lower()}.yaml"
        # If there are two variants of one benchmark, the first in the profile counts.
        files.setdefault(name, yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False))
    return files


def released_kind(directory: Path, parents: Sequence[PinnedCheckpoint]) -> ModelKind:
    """Return the kind of the merge in ``directory``. An adapter has the kind of its base model.

    If the task of its class is not known, the kind has the ``pipeline_tag`` on which the cards of all parents agree.
    """
    is_adapter = not (directory / "config.json").exists()
    kind = kind_of_directory(parents[0].directory if is_adapter else directory)
    if kind.pipeline_tag:
        return kind
    tags = [read_card(card_directory(parent.directory)).metadata.get("pipeline_tag") for parent in parents]
    known = isinstance(tags[0], str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", tags[0])
    return replace(kind, pipeline_tag=str(tags[0])) if known and all(tag == tags[0] for tag in tags) else kind


def contributing_references(recipe: Recipe) -> frozenset[str]:
    """Return the references of all models whose weights contribute to the merge, including every base.

    A model that only provides the tokenizer or that a rule left out does not contribute.
    """
    references = {str(reference) for reference in recipe.merged_references()}
    left_out: set[str] = set()
    for document in (*recipe.steps, recipe):
        left_out |= document.left_out.keys()
        if document.mixture is not None:
            references |= {str(reference) for reference in document.own_references()}
            continue
        bases = [cut.base or document.base for cut in document.slices]
        references |= {str(base) for base in bases if base and document.method.base in ("required", "optional")}
    return frozenset(references - left_out)


def base_models(parents: Sequence[PinnedCheckpoint], *, is_adapter: bool = False) -> list[str]:
    """Return the ids on the Hub for ``base_model``, without duplicates, in the recipe's order.

    The base of an adapter is the model that it is loaded on. The bases of a merge are all models and adapters whose
    weights it contains. The Hub accepts only its own ids, so local models are not named.
    """
    ids: list[str] = []
    for parent in parents:
        ids += [hub_id(parent)] if parent.revision is not None else []
        if parent.adapter and parent.adapter.revision is not None and not is_adapter:
            ids.append(parse_reference(parent.adapter.ref, parent.name).path)
    return list(dict.fromkeys(ids))


def card_metadata(
    content: ReportContent,
    parents: Sequence[PinnedCheckpoint],
    license: Combination,
    *,
    is_adapter: bool = False,
    unused_refs: Collection[str] = (),
) -> dict[str, object]:
    """Return the YAML front matter of the card as plain data.

    ``is_adapter`` means that the release is an adapter of the parents' common base model. ``unused_refs`` holds the
    references of parents whose weights do not contribute, so that ``base_model`` must not name them.
    """
    kind = content.kind
    library, tags = ("peft", ["lora"]) if is_adapter else (kind.library, list[str]())
    base_ids = base_models([each for each in parents if each.ref not in unused_refs], is_adapter=is_adapter)
    bases = ("adapter" if is_adapter else "merge", base_ids)
    return front_matter(kind, parents, license, library, tags, bases) | model_index(content)


def model_index(content: ReportContent) -> dict[str, object]:
    """Return the part of the metadata that states the scores. Empty if the Hub would read no result."""
    kind, scores = content.kind, next(model for model in content.models if model.role == "merge").scores
    # One entry per dataset: the Hub's library merges all metrics of a dataset, even under different names.
    by_dataset: dict[str, list[TaskScore]] = {}
    for score in scores.tasks if scores else ():
        benchmark = evaluated_benchmark(scores, score.task)
        by_dataset.setdefault(benchmark.dataset if benchmark else score.task, []).append(score)
    results = []
    for dataset, dataset_scores in by_dataset.items():
        name, metrics = dataset_scores[0].task, []
        for score in dataset_scores:
            metric, _, variant = score.metric.partition(",")
            metric_type, label = _METRICS.get(metric, (metric, metric.replace("_", " ")))
            if (name_for_people := wording.metric_name(score.metric, kind)) != score.metric:
                metric_type, label = metric.replace("@", "_at_"), name_for_people
            detail = ", ".join([score.task] * (score.task != name) + [variant] * (variant not in ("", "none")))
            in_percent = wording.is_share(score, kind)
            value = round(100 * score.score, 2) if in_percent else round(score.score, 4)
            metrics.append({"type": metric_type, "value": value, "name": f"{label} ({detail})" if detail else label})
        task = {"type": kind.pipeline_tag, "name": TASK_NAMES.get(kind.pipeline_tag or "", kind.pipeline_tag)}
        results.append({"task": task, "dataset": {"name": name, "type": dataset}, "metrics": metrics})
    is_read = results and kind.pipeline_tag  # the Hub reads no result without a task
    return {"model-index": [{"name": content.name, "results": results}]} if is_read else {}


def front_matter(
    kind: ModelKind,
    parents: Sequence[PinnedCheckpoint],
    license: Combination,
    library: str,
    tags: Sequence[str],
    bases: tuple[str, Sequence[str]],
) -> dict[str, object]:
    """Return the part of the metadata that merges and quantized variants have.

    ``kind`` is that of the merge. ``bases`` are the relation to the base models, and their ids on the Hub.
    """
    metadata: dict[str, object] = {**license.card}
    languages = set()
    for parent in parents:
        value = read_card(card_directory(parent.directory)).metadata.get("language")
        words = value if isinstance(value, list) else [value]
        codes = {word for word in words if isinstance(word, str) and re.fullmatch(r"[a-z]{2,3}", word)}
        languages.add(tuple(sorted(codes)))
    if len(languages) == 1 and (common := languages.pop()):  # the parents' cards agree
        metadata["language"] = list(common)
    relation, base_ids = bases
    library_tags = _LIBRARY_TAGS.get(kind.loader, ()) if kind.library == "sentence-transformers" else ()
    all_tags = [*tags, *library_tags, *(["quantized"] if relation == "quantized" else []), "merge", "mergegate"]
    # A model whose task is not known has no task: no wrong one.
    task = {"pipeline_tag": kind.pipeline_tag} if kind.pipeline_tag else {}
    metadata |= {"library_name": library, **task, "tags": list(dict.fromkeys(all_tags))}
    # Without the relation, the Hub takes a merge with a single base for a fine-tuned model.
    return metadata | ({"base_model": list(base_ids), "base_model_relation": relation} if base_ids else {})


def check_card(card: str, metadata: CardMetadata, names: Collection[str]) -> None:
    """Raise Refused if the Hub would read a card, which must contain ``metadata``, differently. Do not contact the Hub.

    ``names`` are those of the other files of the release.
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
    relation = metadata.get("base_model_relation")
    if (relation in _RELATIONS) != bool(base) or (relation is None) == bool(base):
        problem = problem or f"base_model_relation: {relation!r} with the base models {base!r}"
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
