"""Small groups that score their documents the way well-known benchmarks do.

``bbh``: choices scored only by ``acc_norm``. ``mmlu_pro``: free-form answers scored by ``exact_match`` after a filter.
``math``: several metrics from a function of the task. ``ifeval``: one score and a list of scores per document; a custom
function aggregates the lists. ``errors``: an error rate, where lower is better.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from scoring_runs import mean_of, write_task
from tiny_models import words

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
    "bbh_a": "acc_norm,none",
    "bbh_b": "acc_norm,none",
    "mmlu_pro": "exact_match,custom-extract",
    "math_algebra": "exact_match,none",
    "ifeval": "prompt_level_strict_acc,none",
}


def write_leaderboard(directory: Path) -> Path:
    """Write the leaf tasks and the group ``board.yaml``, and return the path of the group's file.

    The group contains ``bbh`` (itself a group), ``mmlu_pro``, ``math_algebra`` and ``ifeval``. ``errors`` is in the
    same directory but in no group.
    """
    rng = random.Random(11)
    for name, config in LEAVES.items():
        rows = [
            {
                "word": word,
                "right": rng.randint(0, 1),
                "choices": [rng.choice("abcdefgh"), "".join(rng.choices("abcdefgh", k=3))],
                "answer": rng.choice("abcdefgh"),
                "letters": rng.choices("abcdefgh", k=rng.randint(1, 3)),
            }
            for word in words(SIZES[name], seed=len(name))
        ]
        write_task(directory, name, rows, doc_to_text="{{word}}", **config)
    (directory / "scoring.py").write_text(FUNCTIONS)
    (directory / "bbh.yaml").write_text("group: bbh\ntask: [bbh_a, bbh_b]\n")
    path = directory / "board.yaml"
    path.write_text("group: board\ntask: [bbh, mmlu_pro, math_algebra, ifeval]\n")
    return path
