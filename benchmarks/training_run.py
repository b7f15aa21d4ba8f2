"""Compare merges of a training run with its last checkpoint and with a learning rate that really decays.

The tables are in ``dev/measurements/training-run.md``.

::

    .venv/bin/python benchmarks/training_run.py [--seeds 5]   # half an hour on a busy machine; prints Markdown

For each seed, the demo's base is trained at a constant learning rate and saves 24 checkpoints
(``profiles/demo/train_run.py``). mergegate merges the last 4, 8 and 16 with every schedule. The same run is also
continued from the start of each window with a learning rate that decays linearly to zero and reads the same batches.
All models are in bfloat16, and are scored in float32 on documents that no model was trained on.

A gain is the log-likelihood of a model minus that of the last checkpoint, on the same document. The interval over
documents takes the mean gain of each document over the seeds. The interval over seeds takes the mean gain of each seed.
Both are two-sided 95 % intervals of Student's t.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "profiles/demo"), str(PROJECT)]
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from curriculum import IGNORED, collate  # noqa: E402  # from the demo's folder
from export import TASK_SKILLS  # noqa: E402
from language import Example  # noqa: E402
from scipy.stats import t as student  # noqa: E402
from train_run import RunPlan, extend_run  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

CHECKPOINTS, EVERY, WINDOWS = 24, 25, (4, 8, 16)
SCHEDULES = ("mean", "linear", "cosine", "minus_sqrt", "exponential", "ema")
LAST = f"checkpoint-{CHECKPOINTS * EVERY}"
TEXTS = "text"
Scores = dict[str, np.ndarray]  # log-likelihood [documents] of each kind, and exact match of each task, as "copy match"


def documents() -> dict[str, list[Example]]:
    """Return the held-out documents of each kind."""
    data = PROJECT / "profiles/demo/data"

    def lines(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]

    tasks = {task: [Example(row["prompt"], row["answer"]) for row in lines(task)] for task in TASK_SKILLS}
    return {TEXTS: [Example("", row["text"]) for row in lines("held-out")], **tasks}


@torch.no_grad()
def score(checkpoint: Path) -> Scores:
    """Return the log-likelihood of each document in nats per token, and whether each answer is right."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    scores: Scores = {}
    for kind, examples in documents().items():
        tokens, labels = collate(examples)
        logits, labels = model(input_ids=tokens).logits[:, :-1], labels[:, 1:]
        counts = labels != IGNORED
        chosen = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        scores[kind] = ((chosen * counts).sum(1) / counts.sum(1)).numpy().astype(np.float64)
        if kind != TEXTS:
            scores[f"{kind} match"] = ((logits.argmax(-1) == labels) | ~counts).all(1).numpy().astype(np.float64)
    return scores


def measure_seed(seed: int, directory: Path) -> dict[str, Scores]:
    """Train, merge and decay one run. Return the scores of each model by its name."""
    import mergegate

    run = directory / "run"
    decayed = {}
    for window in sorted(WINDOWS, reverse=True):
        extend_run(run, RunPlan(CHECKPOINTS - window, EVERY, seed))
        decayed[window] = directory / f"decay-{window}"
        shutil.copytree(run / "trainer", decayed[window] / "trainer")
    extend_run(run, RunPlan(CHECKPOINTS, EVERY, seed))
    scores = {"last checkpoint": score(run / LAST)}
    for window in WINDOWS:
        for schedule in SCHEDULES:
            name = f"{schedule}-{window}"
            recipe = directory / f"{name}.yaml"
            recipe.write_text(f"run: run\nwindow: {window}\nschedule: {schedule}\ndtype: bfloat16\n")
            mergegate.merge(recipe, directory / name, progress=False)
            scores[f"{schedule}, window {window}"] = score(directory / name)
        extend_run(decayed[window], RunPlan(CHECKPOINTS, EVERY, seed, decay=True))
        scores[f"decayed learning rate over {window}"] = score(decayed[window] / LAST)
    return scores


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of values and its two-sided 95 % interval."""
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def print_tables(seeds: list[dict[str, Scores]]) -> None:
    """Print a table of the held-out text and one of the tasks."""
    print("| model | nats per token | gain | over documents | over seeds | seeds with a gain |")
    print("|---|--:|--:|---|---|--:|")
    for model in seeds[0]:
        texts = np.stack([scores[model][TEXTS] for scores in seeds])
        gains = texts - np.stack([scores["last checkpoint"][TEXTS] for scores in seeds])
        cells = [f"{texts.mean():.4f}", "", "", "", ""]
        if gains.any():
            mean, *documents_ends = interval(gains.mean(0))
            _, *seeds_ends = interval(gains.mean(1))
            cells[1:4] = f"{mean:.4f}", *(f"[{low:.4f}, {high:.4f}]" for low, high in (documents_ends, seeds_ends))
            cells[4] = f"{(gains.mean(1) > 0).sum()} of {len(seeds)}"
        print(f"| {model} | {' | '.join(cells)} |")
    print(f"\n| model | {' | '.join(f'{task}, gain over seeds | {task}, exact match' for task in TASK_SKILLS)} |")
    print("|---|" + "--:|--:|" * len(TASK_SKILLS))
    for model in seeds[0]:
        if not model.startswith(("last", "mean", "ema", "decayed")):  # the other schedules differ little from the mean
            continue
        cells = []
        for task in TASK_SKILLS:
            gains = np.array([(scores[model][task] - scores["last checkpoint"][task]).mean() for scores in seeds])
            mean, low, high = interval(gains)
            matches = [100 * scores[model][f"{task} match"].mean() for scores in seeds]
            cells += [f"{mean:.4f} [{low:.4f}, {high:.4f}]" if gains.any() else ""]
            cells += [f"{np.mean(matches):.1f} ({min(matches):.1f} to {max(matches):.1f})"]
        print(f"| {model} | {' | '.join(cells)} |")


def print_comparison(seeds: list[dict[str, Scores]]) -> None:
    """Print a table of the held-out text: each mean against the decay of the learning rate over the same window."""
    print("\n| window | mean minus decayed learning rate | over documents | over seeds | seeds with a gain |")
    print("|--:|--:|---|---|--:|")
    for window in WINDOWS:
        pairs = ((each[f"mean, window {window}"], each[f"decayed learning rate over {window}"]) for each in seeds)
        gains = np.stack([merge[TEXTS] - decayed[TEXTS] for merge, decayed in pairs])
        mean, *documents_ends = interval(gains.mean(0))
        _, *seeds_ends = interval(gains.mean(1))
        ends = " | ".join(f"[{low:.4f}, {high:.4f}]" for low, high in (documents_ends, seeds_ends))
        print(f"| {window} | {mean:.4f} | {ends} | {(gains.mean(1) > 0).sum()} of {len(seeds)} |")


def main() -> int:
    """Measure all seeds, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of training seeds (%(default)s)")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    seeds = []
    for seed in range(parser.parse_args().seeds):
        with tempfile.TemporaryDirectory(prefix="mergegate-training-run-") as directory, redirect_stdout(sys.stderr):
            os.environ["MERGEGATE_HOME"] = f"{directory}/home"
            seeds.append(measure_seed(seed, Path(directory)))
        print(f"seed {seed}", file=sys.stderr, flush=True)
    print_tables(seeds)
    print_comparison(seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
