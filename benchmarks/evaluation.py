"""Compare the cost and the scores of our evaluation with lm-eval's own command, on the same documents.

    python benchmarks/evaluation.py --data ../../shared/data                    # dev/measurements/evaluation-speed.md
    python benchmarks/evaluation.py --data DATA --tasks piqa --documents 40     # a short one
    python benchmarks/evaluation.py --data DATA --shape qwen2.5-0.5b            # a larger random model
    python benchmarks/evaluation.py --data DATA --model SMOLLM2                 # a checkpoint that is there

``DATA`` contains ``arc_easy_test.jsonl``, ``piqa_test.jsonl``, ``gsm8k_test.jsonl``, ``mmlu_hub/``. Without
``--model``, the script creates a model with the shape of SmolLM2-135M (30 layers of 576, 49,152 tokens) or, with
``--shape``, of Qwen2.5-0.5B (24 layers of 896, 151,936 tokens), with random weights and its own tokenizer. Each side is
one process, measured from start to end. lm-eval's side is ``lm-eval run`` with YAML files that include the shipped ones
and point to the same rows. Our side works like a run's scoring process, in the environment of that process. The sides
take turns, and the smallest of ``--repeat`` measurements counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval_agreement as agreement
import yaml

PROJECT = Path(__file__).resolve().parent.parent
# Task → number of examples in its prompt.
TASKS = {"arc_easy": 0, "piqa": 0, "mmlu_anatomy": 5, "mmlu_philosophy": 5, "gsm8k": 2, "gsm8k_cot": 8, "wikitext": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    },
}  # fmt: skip
BATCH = 16
_ALIKE = 1e-3  # relative tolerance of a log-likelihood: other batch sizes change its last digits


@dataclass(frozen=True)
class Side:
    """The cost and the scores of one side, by (document, metric or number of the answer)."""

    seconds: float
    cpu: float
    scores: dict[tuple[int, str], float]


@dataclass(frozen=True)
class Compared:
    """Both sides of one task."""

    task: str
    documents: int
    theirs: Side
    ours: Side

    @property
    def differing(self) -> int:
        """Number of document scores that differ."""
        every = self.theirs.scores.keys() | self.ours.scores.keys()
        return sum(not _alike(self.theirs.scores.get(one), self.ours.scores.get(one)) for one in every)


def _alike(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=_ALIKE, abs_tol=_ALIKE)


def make_model(place: Path, data: Path, shape: str) -> Path:
    """Create a random model of a shape in ``SHAPES``, and a byte-pair tokenizer trained on the tasks' text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    texts = [path.read_text() for path in (data / "arc_easy_test.jsonl", data / "gsm8k_test.jsonl")]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16384, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator((line for text in texts for line in text.splitlines()), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **SHAPES[shape], tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, initializer_range=0.05
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def theirs(task: str, model: Path, where: dict[str, Any], folder: Path, dtype: str) -> Side:
    """Run lm-eval's command."""
    own, out = folder / task, folder / f"{task}-out"
    own.mkdir(parents=True, exist_ok=True)
    leaf = agreement.task_tree(task).leaves[0]
    shipped = {"include": str(leaf.path), **where, "task": f"{task}_here"}
    (own / "task.yaml").write_text(yaml.safe_dump(shipped))
    told = f"pretrained={model},dtype={dtype},softmax_dtype=float32"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", told, "--device", "cpu"]
    command += ["--tasks", f"{task}_here", "--include_path", str(own), "--num_fewshot", str(TASKS[task])]
    command += ["--batch_size", str(BATCH), "--log_samples", "--output_path", str(out)]
    before = os.times()
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, cwd=PROJECT)
    seconds, cpu = time.monotonic() - began, _children(before)
    lines = max(out.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime_ns).read_text().splitlines()
    return Side(seconds, cpu, _scores([json.loads(line) for line in lines]))


def ours(task: str, model: Path, mirror: Path, folder: Path, dtype: str) -> Side:
    """Score the task as a run's process does: load the model, evaluate, score."""
    out = folder / f"{task}-ours.json"
    told = json.dumps([task, str(model), str(mirror), str(folder), str(out), dtype])
    before = os.times()
    began = time.monotonic()
    from mergegate.tasks.models.checkpoints.model_process import WAITING

    environment = {**WAITING, **os.environ}
    subprocess.run([sys.executable, __file__, "--score", told], check=True, cwd=PROJECT, env=environment)
    return Side(time.monotonic() - began, _children(before), _scores(json.loads(out.read_text())))


def score(told: str) -> None:
    """Score in a separate process; a file gets the samples that lm-eval logs for each document."""
    from lm_eval import evaluator

    from mergegate.merge_core.files import HashMemo
    from mergegate.tasks.models.checkpoints import Model
    from mergegate.tasks.quality.evaluation import Scoring, pin_task
    from mergegate.tasks.quality.evaluation.document_order import DocumentRange
    from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob, score_documents
    from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data

    task, model, mirror, folder, out, dtype = json.loads(told)
    if task == "wikitext":
        Path(out).write_text(json.dumps(read_text(Path(model), Path(folder), dtype)))
        return
    logged: list[Any] = []
    evaluate = evaluator.evaluate

    def noted(*args: Any, **named: Any) -> Any:
        results = evaluate(*args, **named)
        logged.extend(results["samples"][task])
        return results

    evaluator.evaluate = noted
    pinned = pin_task(task, Path(folder), HashMemo(Path(folder) / "hashes.db"), Path(mirror))
    scoring = Scoring(num_fewshot=TASKS[task], batch_size=BATCH, dtype=dtype)
    whole = DocumentRange(first=0, last=inspect_data(pinned).documents)
    asked = Model(name="model", digest=model, directory=Path(model))
    score_documents(ScoringJob(asked, pinned, scoring, whole, "cpu"), lambda done, total: None)
    kept = ("doc_id", "filter", "metrics", "filtered_resps")
    rows = [{**{key: row[key] for key in kept}, **{key: row[key] for key in row["metrics"]}} for row in logged]
    Path(out).write_text(json.dumps(rows, default=float))


def read_text(model: Path, folder: Path, dtype: str) -> list[dict[str, Any]]:
    """Return our result for an lm-eval perplexity task: the perplexity stage of a profile on the same texts."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    from mergegate.merge_core.files import JournalLocation, sha256_file
    from mergegate.tasks.models.checkpoints import Model
    from mergegate.tasks.quality.perplexity import HeldOutText, WindowSettings
    from mergegate.tasks.quality.perplexity.measurement import measure

    rows = [json.loads(line) for line in (folder / "theirs/data/wikitext-test.jsonl").read_text().splitlines()]
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": wikitext_detokenizer(row)}) + "\n" for row in rows))
    found = measure(
        Model(name="model", digest=str(model), directory=model),
        HeldOutText(path=texts, sha256=sha256_file(texts)),
        WindowSettings(max_length=2048, dtype=dtype, batch_size=BATCH),
        "cpu",
        JournalLocation(folder / "journal", str(os.getpid())),
        lambda done, total: None,
    )
    return [
        {"doc_id": row.doc_id, "filter": "none", "metrics": [], "filtered_resps": [row.loglik]} for row in found.rows
    ]


def _scores(samples: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Return each metric and log-likelihood of each document; for generated text, whether it is the same."""
    found: dict[tuple[int, str], float] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(sample[metric], list | tuple):  # a text's log-likelihood already covers it
                continue
            found[sample["doc_id"], f"{metric},{sample['filter']}"] = float(sample[metric])
        for number, answer in enumerate(sample["filtered_resps"]):
            if not isinstance(answer, str) or "word_perplexity" in sample["metrics"]:
                likely = answer[0] if isinstance(answer, list | tuple) else answer
                found[sample["doc_id"], f"log-likelihood {number}"] = float(likely)
    return found


def _children(before: os.times_result) -> float:
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def table(compared: list[Compared]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| task | examples | documents | lm-eval, s | CPU, s | ours, s | CPU, s | lm-eval / ours | by CPU | scores | differing |",  # noqa: E501
        "|---|" + "--:|" * 10,
    ]
    for one in compared:
        lines.append(
            f"| `{one.task}` | {TASKS[one.task]} | {one.documents} | {one.theirs.seconds:.1f} | {one.theirs.cpu:.1f} "
            f"| {one.ours.seconds:.1f} | {one.ours.cpu:.1f} | {one.theirs.seconds / one.ours.seconds:.2f} "
            f"| {one.theirs.cpu / one.ours.cpu:.2f} | {len(one.theirs.scores)} | {one.differing} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--score", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.score:
        score(said.score)
        return 0
    if said.data is None:
        parser.error("--data: where the documents lie")
    agreement.DOCUMENTS = said.documents
    compared = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, mirror = Path(scratch), Path(scratch) / "mirror"
        model = said.model.resolve() if said.model else make_model(folder / "model", said.data, said.shape)
        for task in said.tasks:
            where = agreement.lay_out(task, said.data, mirror, folder / "theirs")
            turns = [
                (theirs(task, model, where, folder, said.dtype), ours(task, model, mirror, folder, said.dtype))
                for _ in range(said.repeat)
            ]
            best = [min(side, key=lambda one: one.seconds) for side in zip(*turns, strict=True)]
            documents = len({document for document, _ in best[1].scores})
            compared.append(Compared(task, documents, best[0], best[1]))
            print(table(compared[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(compared))
    return int(any(one.differing for one in compared))


if __name__ == "__main__":
    raise SystemExit(main())
