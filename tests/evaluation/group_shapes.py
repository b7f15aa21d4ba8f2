"""Small groups that score their documents the way well-known benchmarks do.

``bbh``: choices scored only by ``acc_norm``. ``mmlu_pro``: free-form answers scored by ``exact_match`` after a filter.
``math``: several metrics from a function of the task. ``ifeval``: one score and a list of scores per document; a custom
function aggregates the lists. ``errors``: an error rate, where lower is better.
"""

from __future__ import annotations

import random
from pathlib import Path

from tiny_models import words, write_jsonl

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

BBH = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data/{name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{word}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: right
target_delimiter: ""
metric_list:
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
GENERATED = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data/{name}.jsonl}}}}
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: "{{{{word}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 5, do_sample: false}}
"""
MMLU_PRO = (
    GENERATED
    + """num_fewshot: 1
fewshot_config: {{sampler: first_n}}
filter_list:
  - name: custom-extract
    filter: [{{function: regex, regex_pattern: "([a-h])"}}, {{function: take_first}}]
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
"""
)
MATH = (
    GENERATED
    + """process_results: !function scoring.length
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
  - {{metric: exact_match_original, aggregation: mean, higher_is_better: true}}
"""
)
IFEVAL = (
    GENERATED
    + """process_results: !function scoring.instructions
metric_list:
  - {{metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}}
  - {{metric: inst_level_strict_acc, aggregation: !function scoring.over_instructions, higher_is_better: true}}
"""
)
ERRORS = (
    GENERATED
    + """process_results: !function scoring.errors
metric_list:
  - {{metric: error_rate, aggregation: mean, higher_is_better: false}}
"""
)
LEAVES = {"bbh_a": BBH, "bbh_b": BBH, "mmlu_pro": MMLU_PRO, "math_algebra": MATH, "ifeval": IFEVAL}
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
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "scoring.py").write_text(FUNCTIONS)
    for name, text in {**LEAVES, "errors": ERRORS}.items():
        (directory / f"{name}.yaml").write_text(text.format(name=name))
        write_jsonl(
            directory / "data" / f"{name}.jsonl",
            (
                {
                    "word": word,
                    "right": rng.randint(0, 1),
                    "choices": [rng.choice("abcdefgh"), "".join(rng.choices("abcdefgh", k=3))],
                    "answer": rng.choice("abcdefgh"),
                    "letters": rng.choices("abcdefgh", k=rng.randint(1, 3)),
                }
                for word in words(SIZES[name], seed=len(name))
            ),
        )
    (directory / "bbh.yaml").write_text("group: bbh\ntask: [bbh_a, bbh_b]\n")
    path = directory / "board.yaml"
    path.write_text("group: board\ntask: [bbh, mmlu_pro, math_algebra, ifeval]\n")
    return path
