"""Compare our scores with lm-eval's own, document by document, on forty of its tasks with small local data.

    python benchmarks/lm_eval_agreement.py --data ../../shared/data       # the table, as Markdown; two minutes
    python benchmarks/lm_eval_agreement.py --tasks sciq copa              # some of them; without --data those made here

The result is in ``dev/measurements/lm-eval-agreement.md``. Our side works like a profile: a task by name,
``evaluate.data``, scores by document. lm-eval's side is ``simple_evaluate`` with a YAML file that includes the shipped
one and points it to the same rows, in the fields of the real dataset. The model is random and tiny, so its answers are
arbitrary. Each prompt has two examples.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import yaml

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.evaluation import Scoring, pin_task
from mergegate.tasks.quality.evaluation.definitions.tree import task_tree

Row = dict[str, Any]
EXAMPLES = 2
DOCUMENTS = 8
LETTERS = "ABCDE"
_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sea",
    "red",
    "sun",
    "old",
    "ran",
    "sat",
    "eats",
    "sees",
    "big",
    "far",
    "moon",
    "salt",
    "tree",
    "iron",
    "ice",
    "wind",
    "bird",
    "map",
    "two",
    "few",
]


@dataclass(frozen=True)
class Agreement:
    """The comparison of one task."""

    task: str
    kind: str  # output type
    documents: int
    numbers: int  # scores compared: document, metric and filter
    differing: int


def text(rng: random.Random, words: int = 6) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def choices(rng: random.Random, n: int = 4) -> dict[str, list[str]]:
    return {"text": [text(rng, 2) for _ in range(n)], "label": list(LETTERS[:n])}


# Task → a function that creates a document in the fields of its dataset.
SCHEMAS: Mapping[str, Callable[[random.Random], Row]] = {
    "sciq": lambda r: {
        "question": text(r), "support": text(r, 12), "correct_answer": text(r, 1),
        "distractor1": text(r, 2), "distractor2": text(r, 2), "distractor3": text(r, 2),
    },
    "boolq": lambda r: {"question": text(r), "passage": text(r, 12), "label": r.randint(0, 1)},
    "copa": lambda r: {
        "premise": text(r) + ".", "choice1": text(r), "choice2": text(r),
        "question": r.choice(["cause", "effect"]), "label": r.randint(0, 1),
    },
    "openbookqa": lambda r: {"question_stem": text(r), "choices": choices(r), "answerKey": r.choice("ABCD")},
    "winogrande": lambda r: {
        "sentence": f"{text(r)} _ {text(r)}", "option1": text(r, 1), "option2": text(r, 2), "answer": r.choice("12"),
    },
    "hellaswag": lambda r: {
        "ctx_a": text(r), "ctx_b": text(r), "ctx": text(r), "activity_label": text(r, 1),
        "endings": [text(r, 4) for _ in range(4)], "label": str(r.randint(0, 3)),
    },
    "commonsense_qa": lambda r: {"question": text(r), "choices": choices(r, 5), "answerKey": r.choice(LETTERS)},
    "lambada_openai": lambda r: {"text": text(r, 12)},
    "arithmetic_2da": lambda r: {"context": f"Question: {text(r)}\nAnswer:", "completion": f" {r.randint(0, 9)}"},
    "blimp_adjunct_island": lambda r: {"sentence_good": text(r), "sentence_bad": text(r)},
    "rte": lambda r: {"sentence1": text(r), "sentence2": text(r), "label": r.randint(0, 1)},
    "sst2": lambda r: {"sentence": text(r), "label": r.randint(0, 1)},
    "qnli": lambda r: {"question": text(r), "sentence": text(r), "label": r.randint(0, 1)},
    "wic": lambda r: {
        "sentence1": text(r), "sentence2": text(r), "word": "cat", "start1": 0, "end1": 3, "start2": 0, "end2": 3,
        "label": r.randint(0, 1),
    },
    "nq_open": lambda r: {"question": text(r), "answer": [text(r, 1)]},
    "triviaqa": lambda r: {"question": text(r), "answer": {"aliases": [text(r, 1), text(r, 1)], "value": "cat"}},
    "asdiv": lambda r: {"body": text(r), "question": text(r), "answer": f"{r.randint(1, 9)} (cats)"},
    "swag": lambda r: {
        "startphrase": text(r), "ending0": text(r), "ending1": text(r, 3), "ending2": text(r), "ending3": text(r, 2),
        "label": r.randint(0, 3),
    },
    "medmcqa": lambda r: {
        "question": text(r), "opa": text(r, 2), "opb": text(r, 2), "opc": text(r, 2), "opd": text(r, 2),
        "cop": r.randint(0, 3),
    },
    "anagrams1": lambda r: {"context": f"{text(r)} =", "completion": text(r, 1)},
}  # fmt: skip
SUBJECTS = [
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_physics",
    "econometrics",
    "formal_logic",
    "global_facts",
    "high_school_geography",
    "human_aging",
    "marketing",
    "nutrition",
    "philosophy",
    "virology",
]
OF_DATA = ("arc_easy", "arc_challenge", "piqa", "gsm8k")
_FILES = {"gsm8k_cot": "gsm8k_test.jsonl", "wikitext": "wikitext2_test_docs.jsonl"}  # not named after the task


def made_rows(task: str) -> dict[str, list[Row]]:
    """Create documents and examples of a task in ``SCHEMAS``."""
    rng = random.Random(task)
    evaluated, drawn = _splits(task)
    return {split: [SCHEMAS[task](rng) for _ in range(DOCUMENTS)] for split in dict.fromkeys((evaluated, drawn))}


def _splits(task: str) -> tuple[str, str]:
    config = task_tree(task).leaves[0].config
    evaluated = config.get("test_split") or config["validation_split"]
    drawn = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split") or evaluated
    return evaluated, drawn


def rows_of_data(task: str, data: Path) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Return documents and examples of a task in ``OF_DATA``, as stored and in the fields of the real dataset."""
    evaluated, drawn = _splits(task)
    rows = _read(data / _FILES.get(task, f"{task}_test.jsonl"))
    plain = {evaluated: rows[:DOCUMENTS], drawn: rows[DOCUMENTS : 2 * DOCUMENTS]}
    return plain, {split: [_as_on_the_hub(task, row) for row in those] for split, those in plain.items()}


def _as_on_the_hub(task: str, row: Row) -> Row:
    if task == "piqa":
        return {"goal": row["question"], "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["answer"]}
    if task.startswith("arc"):
        labels = list(LETTERS[: len(row["choices"])])
        return {
            "question": row["question"],
            "choices": {"text": row["choices"], "label": labels},
            "answerKey": labels[row["answer"]],
        }
    return row


def lay_out(task: str, data: Path | None, mirror: Path, theirs: Path) -> dict[str, Any]:
    """Write a task's rows where ``evaluate.data`` and lm-eval's own run find them, and return its part of a YAML."""
    if task.startswith("mmlu_"):
        assert data is not None
        subject = task.removeprefix("mmlu_")
        rows = {split: _read(data / "mmlu_hub" / subject / f"{split}.jsonl")[:DOCUMENTS] for split in ("test", "dev")}
        for split, those in rows.items():
            _write(mirror / "cais" / "mmlu" / subject / f"{split}.jsonl", those)
    elif task in OF_DATA or task in _FILES:
        assert data is not None
        lying, rows = rows_of_data(task, data)
        for split, those in lying.items():
            _write(mirror / f"{task}_{split}.jsonl", those)
    else:
        rows = made_rows(task)
        for split, those in rows.items():
            _write(mirror / f"{task}_{split}.jsonl", those)
    files = {split: str(_write(theirs / "data" / f"{task}-{split}.jsonl", those)) for split, those in rows.items()}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def theirs_by_document(task: str, model: Path, where: Mapping[str, Any], folder: Path) -> dict[tuple[str, int], Any]:
    """Run lm-eval itself, and return its score by (metric with filter, document), only for metrics that it averages."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = folder / task
    own.mkdir(parents=True)
    leaf = task_tree(task).leaves[0]
    (own / "task.yaml").write_text(yaml.safe_dump({"include": str(leaf.path), **where, "task": task}))
    lm = HFLM(pretrained=str(model), device="cpu", batch_size=16, dtype="float32", softmax_dtype="float32")
    manager = TaskManager(include_path=str(own), include_defaults=False)
    results = simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, num_fewshot=EXAMPLES, log_samples=True, bootstrap_iters=0
    )
    loaded = manager.load([task])["tasks"][task]
    means = {name for name, how in loaded.aggregation().items() if how.__name__ == "mean"}
    return {
        (f"{metric},{sample['filter']}", sample["doc_id"]): float(sample[metric])
        for sample in results["samples"][task]
        for metric in sample["metrics"]
        if metric in means
    }


def ours_by_document(task: str, model: Path, mirror: Path, scratch: Path) -> dict[tuple[str, int], Any]:
    """Score the task as a profile with ``evaluate.data`` does."""
    from mergegate.tasks.quality.evaluation.document_order import DocumentRange
    from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob, score_documents
    from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data

    pinned = pin_task(task, scratch, HashMemo(scratch / "hashes.db"), mirror)
    asked = Model(name="random", digest=str(model), directory=model)
    whole = DocumentRange(first=0, last=inspect_data(pinned).documents)
    scoring = Scoring(num_fewshot=EXAMPLES)
    scored = score_documents(ScoringJob(asked, pinned, scoring, whole, "cpu"), lambda done, total: None)
    return {(row.metric, row.doc_id): row.outcome for row in scored if not row.metric.startswith("prob,")}


def compare(tasks: Iterable[str], data: Path | None, scratch: Path) -> list[Agreement]:
    model = random_model(scratch / "model")
    mirror, folder = scratch / "mirror", scratch / "theirs"
    found = []
    for task in tasks:
        where = lay_out(task, data, mirror, folder)
        theirs = theirs_by_document(task, model, where, folder)
        ours = ours_by_document(task, model, mirror, scratch)
        every = theirs.keys() | ours.keys()
        differing = sum(theirs.get(key) != ours.get(key) for key in every)
        kind = task_tree(task).leaves[0].config.get("output_type", "generate_until")
        found.append(Agreement(task, kind, len({document for _, document in every}), len(every), differing))
    return found


def random_model(directory: Path) -> Path:
    """Save a random Llama over single characters in ``directory``."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokens = ["<unk>", "</s>", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.4, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Our scores against lm-eval's own, document by document.")
    parser.add_argument("--data", type=Path, help="directory with arc_easy_test.jsonl, mmlu_hub/ and others")
    parser.add_argument("--tasks", nargs="*", help="only these")
    said = parser.parse_args()
    every = [*SCHEMAS, *((*OF_DATA, *(f"mmlu_{each}" for each in SUBJECTS)) if said.data else ())]
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(said.tasks or every, said.data, Path(scratch))
    print("| task | output type | documents | scores compared | differing |\n|---|---|---:|---:|---:|")
    for each in found:
        print(f"| `{each.task}` | {each.kind} | {each.documents} | {each.numbers} | {each.differing} |")
    print(f"| {len(found)} tasks | | {sum(e.documents for e in found)} | {sum(e.numbers for e in found)} | "
          f"{sum(e.differing for e in found)} |")  # fmt: skip
    return int(any(each.differing for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
