"""Write scores for the leaderboards of the Hub: ``.eval_results/NAME.yaml``, for tasks that are registered benchmarks.

A leaderboard compares models on a complete benchmark under one metric, with values in percent. Scores from a sample of
the documents, under another metric, or on data that is not the benchmark's own dataset at a known commit are not
written. ``BENCHMARKS`` maps tasks to benchmarks. Scores of other tasks appear only in the model index of the card.

An entry has the revision of the dataset that was loaded, a source and notes, which are optional. It has no ``date``,
because a release contains none. The Hub then shows the date of the commit. It has no ``verifyToken``, because only the
Hub issues one, for evaluations that ran in its own jobs.

Sources: https://huggingface.co/docs/hub/eval-results; the ``eval.yaml`` of each dataset (ids of its tasks).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote

import yaml

from mergegate.tasks.evaluation import Scores
from mergegate.tasks.publish.content import EVAL_RESULTS
from mergegate.tasks.report import ReportContent


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
