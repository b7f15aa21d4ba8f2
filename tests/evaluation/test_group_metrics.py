"""In a group with mixed metrics, every document counts as lm-eval scores it, or mergegate refuses the run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval_runs import UNWRITTEN, prepare, run_lm_eval, run_lm_eval_here
from samples import sampled_rows
from scoring_runs import mean_of, model_in, pin, score, write_task
from tiny_models import words, write_choices

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.results import find_results, read_task
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data
from mergegate.tasks.quality.evaluation.scoring.metrics import choose_metrics
from mergegate.tasks.quality.evaluation.scoring.scores import score_table

DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo" / "models" / "reverser"


FUNCTIONS = '''"""Functions of the tasks."""


def length(doc, results):
    """As in MATH: two ways of being right, from one answer."""
    answer = results[0].strip()
    return {"exact_match": int(answer[:1] == doc["answer"][:1]), "exact_match_original": int(answer == doc["answer"])}


def instructions(doc, results):
    """As in IFEval: whether all instructions were followed, and each of them."""
    followed = [letter in results[0] for letter in doc["letters"]]
    return {"prompt_level_strict_acc": all(followed), "inst_level_strict_acc": followed}


def over_instructions(items):
    """The mean over instructions, not over documents."""
    flat = [one for item in items for one in item]
    return sum(flat) / len(flat)


def errors(doc, results):
    """Less is better."""
    return {"error_rate": float(doc["letters"][0] not in results[0])}
'''

BBH: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "right"}
BBH |= {"target_delimiter": "", "metric_list": [mean_of("acc_norm")]}
GENERATED: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "fewshot_split": "test"}
GENERATED |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 5, "do_sample": False}}
LETTER = [{"function": "regex", "regex_pattern": "([a-h])"}, {"function": "take_first"}]
MMLU_PRO = GENERATED | {"num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}}
MMLU_PRO |= {"filter_list": [{"name": "custom-extract", "filter": LETTER}]}
MMLU_PRO |= {"metric_list": [mean_of("exact_match", ignore_case=True)]}
INSTRUCTIONS = mean_of("inst_level_strict_acc", aggregation="!function scoring.over_instructions")


def scored_by(function: str, *metrics: dict[str, Any]) -> dict[str, Any]:
    return {**GENERATED, "process_results": f"!function scoring.{function}", "metric_list": list(metrics)}


LEAVES: dict[str, dict[str, Any]] = {
    "bbh_a": BBH,
    "bbh_b": BBH,
    "mmlu_pro": MMLU_PRO,
    "math_algebra": scored_by("length", mean_of("exact_match"), mean_of("exact_match_original")),
    "ifeval": scored_by("instructions", mean_of("prompt_level_strict_acc"), INSTRUCTIONS),
    "errors": scored_by("errors", mean_of("error_rate", higher_is_better=False)),
}
SIZES = {"bbh_a": 9, "bbh_b": 5, "mmlu_pro": 11, "math_algebra": 7, "ifeval": 6, "errors": 8}
DEFAULTS = {
    "bbh_a": "acc_norm,none", "bbh_b": "acc_norm,none", "mmlu_pro": "exact_match,custom-extract",
    "math_algebra": "exact_match,none", "ifeval": "prompt_level_strict_acc,none",
}  # fmt: skip


def write_leaderboard(directory: Path) -> Path:
    """Write the leaf tasks and the group ``board.yaml``, and return the path of the group's file."""
    rng = random.Random(11)

    def row(word: str) -> dict[str, Any]:
        right, first = rng.randint(0, 1), rng.choice("abcdefgh")
        choices = [first, "".join(rng.choices("abcdefgh", k=3))]
        answer, letters = rng.choice("abcdefgh"), rng.choices("abcdefgh", k=rng.randint(1, 3))
        return {"word": word, "right": right, "choices": choices, "answer": answer, "letters": letters}

    for name, config in LEAVES.items():
        rows = list(map(row, words(SIZES[name], seed=len(name))))
        write_task(directory, name, rows, doc_to_text="{{word}}", **config)
    (directory / "scoring.py").write_text(FUNCTIONS)
    (directory / "bbh.yaml").write_text("group: bbh\ntask: [bbh_a, bbh_b]\n")
    path = directory / "board.yaml"
    path.write_text("group: board\ntask: [bbh, mmlu_pro, math_algebra, ifeval]\n")
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaderboard(tmp_path_factory.mktemp("tasks")).parent


def ours(definition: Path) -> tuple[DocumentScore, ...]:
    """Score all documents with mergegate, in two parts."""
    task = pin(definition)
    total = inspect_data(task).documents
    parts = ((0, total // 3), (total // 3, total))
    return tuple(row for part in parts for row in score(model_in(DEMO), task, part))


@pytest.fixture(scope="module")
def scored(tasks: Path) -> Iterator[tuple[DocumentScore, ...]]:
    yield ours(tasks / "board.yaml")
    unload_models()


@pytest.fixture(scope="module")
def written(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results that lm-eval writes for the demo model on the same group."""
    root = tmp_path_factory.mktemp("lm-eval")
    leaves = [tasks / f"{name}.yaml" for name in (*DEFAULTS, "errors")]
    folder = prepare(leaves, root)
    for group in ("bbh", "board"):
        (folder / f"{group}.yaml").write_text((tasks / f"{group}.yaml").read_text())
    return run_lm_eval(root / "out", DEMO, leaves, root, tasks=["board", "errors"])


def results_of(written: Path) -> Any:
    return json.loads(find_results(written)[0].path.read_text())


@pytest.mark.story
def test_every_document_is_scored_as_by_lm_eval_itself(scored: tuple[DocumentScore, ...], written: Path) -> None:
    theirs = read_task(find_results(written), "board").outcomes
    ours, whole = (sorted(row._replace(**UNWRITTEN) for row in rows) for rows in (scored, theirs))
    assert [row._replace(outcome=0.0) for row in ours] == [row._replace(outcome=0.0) for row in whole]
    judged = [[row.outcome for row in rows if row.metric != "prob,none"] for rows in (ours, whole)]
    assert judged[0] == judged[1]
    graded = [[row.outcome for row in rows if row.metric == "prob,none"] for rows in (ours, whole)]
    # In bfloat16, a different batch size changes a log-likelihood by a few hundredths.
    assert graded[0] == pytest.approx(graded[1], rel=0.1)
    assert len({(row.task, row.doc_id) for row in scored}) == sum(SIZES[leaf] for leaf in DEFAULTS)


def test_each_leaf_has_its_own_metric_and_no_document_is_lost(scored: tuple[DocumentScore, ...], written: Path) -> None:
    metrics = choose_metrics(scored, None, "board")
    assert metrics.by_leaf_if_different == DEFAULTS
    judged = metrics.judge(scored, "board")
    results = results_of(written)
    for leaf, metric in DEFAULTS.items():
        of_leaf = [row.outcome for row in judged if row.task == leaf]
        assert len(of_leaf) == results["n-samples"][leaf]["effective"] == SIZES[leaf]
        assert sum(of_leaf) / len(of_leaf) == pytest.approx(results["results"][leaf][metric])
    assert len({row.outcome for row in judged}) == 2  # mixed outcomes, so the test can fail


def test_the_table_shows_all_documents_and_each_metric(scored: tuple[DocumentScore, ...]) -> None:
    table = {score.metric: score for score in score_table("board", scored)}
    every = "acc_norm,none + prompt_level_strict_acc,none + exact_match,none + exact_match,custom-extract"
    assert set(every.split(" + ")) | {every, "exact_match_original,none", "prob,none"} == table.keys()
    assert table[every].n == sum(SIZES[leaf] for leaf in DEFAULTS)
    assert table["acc_norm,none"].n == table["prob,none"].n == SIZES["bbh_a"] + SIZES["bbh_b"]


def test_parts_give_the_prompts_and_scores_of_the_whole_with_few_shot_examples(
    scored: tuple[DocumentScore, ...], written: Path
) -> None:
    ours, theirs = (
        {(row.task, row.doc_id): row.prompt_hash for row in rows if row.task == "mmlu_pro"}  # one example each
        for rows in (scored, read_task(find_results(written), "mmlu_pro").outcomes)
    )
    assert ours == theirs


def test_lower_is_better_is_reversed_in_a_mixed_group(tasks: Path, written: Path) -> None:
    (tasks / "mixed.yaml").write_text("group: mixed\ntask: [errors, bbh_a]\n")
    rows = ours(tasks / "mixed.yaml")
    metrics = choose_metrics(rows, None, "mixed")
    assert metrics.higher_is_better
    rate = results_of(written)["results"]["errors"]["error_rate,none"]
    turned = [row.outcome for row in metrics.judge(rows, "mixed") if row.task == "errors"]
    assert 0 < rate < 1
    assert sum(turned) / len(turned) == pytest.approx(1 - rate)
    alone = [row for row in rows if row.task == "errors"]
    assert not choose_metrics(alone, None, "errors").higher_is_better
    (only,) = score_table("errors", alone)
    assert (only.score, only.higher_is_better) == (pytest.approx(rate), False)


@pytest.mark.story
def test_inline_tasks_and_overrides_match_lm_eval(tasks: Path, tmp_path: Path) -> None:
    """The reference is lm-eval itself, which reads the group's file with absolute paths."""
    data = {"data_files": {"test": f"{tasks}/math_algebra.jsonl"}, "cache_dir": f"{tmp_path}/cache"}
    config = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "output_type": "generate_until"}
    config |= {"doc_to_text": "{{word}}", "doc_to_target": "{{answer}}", "process_results": "!function scoring.length"}
    config |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 5}}
    own = {"task": "own", **config, "metric_list": [mean_of("exact_match_original")]}
    members = [{"task": "mmlu_pro", "num_fewshot": 2}, {"group": "inner", "task": [own]}]
    path = write_task(tasks, "inlined", group="inlined", num_fewshot=0, task=members)
    rows = ours(path)
    folder = prepare([tasks / "mmlu_pro.yaml"], tmp_path)
    for name in ("scoring.py", "inlined.yaml"):
        (folder / name).write_text((tasks / name).read_text())
    found = run_lm_eval_here(DEMO, [tasks / "mmlu_pro.yaml"], tmp_path, tasks=["inlined"])
    theirs = {
        (leaf, sample["doc_id"], sample["prompt_hash"], float(sample[sample["metrics"][0]]))
        for leaf, samples in found.items()
        for sample in samples
    }
    assert {leaf for leaf, *_ in theirs} == {"mmlu_pro", "inlined::inner::own"}
    assert {(row.task, row.doc_id, row.prompt_hash, row.outcome) for row in rows} == theirs


COMPLAINTS = [
    ("return {} if doc['right'] else {'acc': 1.0}", r"\d of 6 documents of own without a score"),
    ("return {'other': 1.0}", "task own: no metric that is a mean over documents .*only acc, other"),
    ("return {'acc': (1, 0)}", "task g: document scores that lm-eval cannot average"),
    ("return {'acc': float('nan')}", r"model: task own: acc,none of document \d is nan(.|\n)*perplexity"),
    ("return {'acc': float('-inf')}", r"model: task own: acc,none of document \d is -inf"),
]


@pytest.mark.parametrize(("deed", "complaint"), sampled_rows(COMPLAINTS, COMPLAINTS[:2]))
def test_a_document_without_a_score_is_refused_by_leaf_before_anything_is_stored(
    tmp_path: Path, deed: str, complaint: str
) -> None:
    write_choices(tmp_path, 6)
    write_choices(tmp_path, 6, name="own", extra="process_results: !function own.score\n")
    (tmp_path / "own.py").write_text(f"def score(doc, results):\n    {deed}\n    return {{'acc': 1.0}}\n")
    (tmp_path / "g.yaml").write_text("group: g\ntask: [letters, own]\n")
    with pytest.raises(InvalidInput, match=complaint):
        score(model_in(DEMO, "model"), pin(tmp_path / "g.yaml"), (0, 12))
