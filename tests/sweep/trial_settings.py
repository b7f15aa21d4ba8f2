"""Build studies over the demo models with few documents, and run the merge and evaluation stages for comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import Model, pin_checkpoints, resolve_parents
from mergegate.tasks.quality.evaluation import DocumentScore, EvalTask, Scoring, pin_task
from mergegate.tasks.quality.evaluation.document_order import DocumentRange, order_documents
from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob, score_documents
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data
from mergegate.tasks.quality.perplexity import PerplexitySettings, pin_documents
from mergegate.tasks.sweep.objective import TEXT, MetricKey
from mergegate.tasks.sweep.trial import TrialSet, TrialSetting

DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
PLAIN = ("copy", "reverse", "shift")

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: ../data/{data}.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
CHOICES = TASK.format(name="choices", data="choices", kind="multiple_choice", metric="acc")
CHOICES += 'doc_to_choice: "{{choices}}"\ndoc_to_target: right\n'
WRITTEN = TASK.format(name="written", data="reverse", kind="generate_until", metric="exact_match")
WRITTEN += 'doc_to_target: "{{answer}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
FEW_SHOT = "task: few_shot\ninclude: reverse.yaml\nnum_fewshot: 2\nfewshot_split: test\n"


def demo(directory: Path, documents: int) -> Path:
    """Write the demo's tasks with only the first ``documents`` documents, and three tasks of other kinds."""
    shutil.copytree(DEMO / "tasks", directory / "tasks")
    shutil.copytree(DEMO / "data", directory / "data")
    for name in PLAIN:
        path = directory / "data" / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:documents]))
    rows = [json.loads(line) for line in (directory / "data/reverse.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        wrong = row["answer"][::-1]
        row["choices"] = [row["answer"], wrong, wrong[:-1]] if number % 2 else [wrong[:1], row["answer"]]
        row["right"] = 0 if number % 2 else 1
    (directory / "data/choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = directory / "data/held-out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[: 2 * documents]))
    for name, text in (("choices", CHOICES), ("written", WRITTEN), ("few_shot", FEW_SHOT)):
        (directory / "tasks" / f"{name}.yaml").write_text(text)
    return directory


def setting_of(directory: Path, metric_keys: Sequence[MetricKey], **more: Any) -> TrialSetting:
    """Return a study over the models base, reverser and shifter."""
    hashes = HashMemo(directory / "hashes.db")
    recipe = load_recipe(ties(), location="demo")
    names = dict.fromkeys(one.task for one in metric_keys if one.task != TEXT)
    text = pin_documents(PerplexitySettings(documents=directory / "data/held-out.jsonl"), directory, hashes)
    documents = TrialSet(tuple(pin_task(f"tasks/{name}.yaml", directory, hashes) for name in names), text)
    fields = {
        "parents": pin_checkpoints(resolve_parents(recipe), hashes),
        "sets": {"search": documents, "confirmation": documents},
        **{"metric_keys": tuple(metric_keys), "scoring": Scoring()},
    }
    return TrialSetting(**(fields | more))


def ties(weight: float = 1.0, density: float = 0.5, method: str = "ties", dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the demo's recipe."""
    parameters = {"weight": weight, "density": density}
    return {
        "merge_method": method,
        "base_model": str(DEMO / "models/base"),
        "models": [
            {"model": str(DEMO / "models" / name), "parameters": parameters} for name in ("reverser", "shifter")
        ],
        "parameters": {"lambda": 1.0},
        "dtype": dtype,
    }


def written_merge(setting: TrialSetting, recipe: dict[str, Any], out: Path) -> Model:
    """Write the same merge with the engine."""
    loaded = load_recipe(recipe)
    plan = plan_merge(loaded, {parent.ref: parent.open() for parent in setting.parents})
    merge_weights(plan, out, seed=setting.seed, device="cpu")
    return Model(name="merge", digest=str(out), directory=out)


def stage_scores(model: Model, task: EvalTask, scoring: Scoring, metric: str) -> list[float]:
    """Return the evaluation stage's score of each document, in the order in which documents are scored."""
    part = DocumentRange(first=0, last=inspect_data(task).documents)
    scored = score_documents(ScoringJob(model, task, scoring, part, "cpu"), lambda done, of: None)
    rows: dict[tuple[str, int], DocumentScore] = {(row.task, row.doc_id): row for row in scored if row.metric == metric}
    return [rows[document].outcome for document in order_documents({task.name: part.last}, scoring.seed)]


@dataclass(frozen=True)
class StopsAt:
    """A stopping rule for tests that drops every candidate at one look."""

    looks: tuple[float, ...]
    look: int

    def should_drop(self, table: Mapping[MetricKey, Any], look: int) -> bool:
        return look == self.look
