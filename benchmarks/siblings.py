"""Measure the savings of interim looks over all documents, on good, mediocre and broken merges of two siblings.

::

    .venv/bin/python benchmarks/siblings.py --data DATA --work WORK                 # a small base, made here
    .venv/bin/python benchmarks/siblings.py --data DATA --work WORK --base SMOLLM2  # a checkpoint that is there

``DATA`` contains ``arc_easy_test.jsonl``, ``arc_challenge_test.jsonl``, ``gsm8k_test.jsonl`` and
``wikitext2_test_docs.jsonl``. mergegate merges two short fine-tunes of the base (``benchmarks/sibling_models.py``), and
``mergegate compare`` compares each merge with the first of them: perplexity of WikiText, ARC-Easy, and GSM8K as a
choice between the right number and an intermediate number of the solution. One mode uses interim looks, the default.
The other sets ``documents: all``. Each mode has its own store. With ``--lend``, the second mode continues in a copy of
the first one's store. Parts of a task are the same in both, so shared parts are scored once, and their seconds count in
both.

Existing models are not created again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sibling_models as models
import yaml

PROJECT = Path(__file__).resolve().parent.parent
_START = "from mergegate.flows.cli import main; main()"
_CHOICE = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
# Recipes by name: a linear merge of both, almost none of the other one, and neighboring layers swapped.
MERGES = ("good", "equal", "broken")


class Spent(NamedTuple):
    """The cost of one comparison."""

    merge: str
    mode: str  # 'looks' or 'all'
    outcome: str
    documents: int  # documents of the merge that were scored
    reference: int  # documents of the sibling that were scored for it; 0 if scores existed
    seconds: float
    cpu: float  # seconds of all its processes
    reason: str


def write_evidence(data: Path, work: Path, tasks: Mapping[str, int]) -> None:
    """Write documents, tasks and a profile for each mode, below ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    arc = models.read_lines(data / "arc_easy_test.jsonl")[: models.SCORED_ARC]
    gsm8k = models.read_lines(data / "gsm8k_test.jsonl")[: models.SCORED_GSM8K]
    pages = models.read_lines(data / "wikitext2_test_docs.jsonl")[: models.SCORED_PAGES]
    _write(work / "arc_easy.jsonl", arc[: tasks["arc_easy"]])
    _write(work / "gsm8k.jsonl", [_as_choice(one) for one in gsm8k[: tasks["gsm8k"]]])
    _write(work / "wikitext.jsonl", [{"text": str(page["page"])[: models.PAGE]} for page in pages])
    for name in tasks:
        (work / f"{name}.yaml").write_text(_CHOICE.format(name=name))
    for mode in ("looks", "all"):
        evaluate: dict[str, Any] = {"tasks": [{"task": f"{name}.yaml", "guarded_by": "science"} for name in tasks]}
        if mode == "all":
            evaluate["documents"] = "all"
        profile = {
            "name": "siblings",
            "recipe": "good.yaml",
            "perplexity": {"documents": "wikitext.jsonl"},
            "evaluate": evaluate,
        }
        (work / f"profile-{mode}.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))


def write_recipes(work: Path, layers: int) -> None:
    """Write one file for each of ``MERGES``; ``layers`` is the number of layers of the base."""
    at, width = layers // 3, max(1, layers // 15)
    blocks = [(0, at), (at + width, at + 2 * width), (at, at + width), (at + 2 * width, layers)]
    slices = [{"sources": [{"model": "science", "layer_range": list(block)}]} for block in blocks]
    linear = {"good": (0.5, 0.5), "equal": (0.95, 0.05)}
    for name, (science, sums) in linear.items():
        weighed = [
            {"model": "science", "parameters": {"weight": science}},
            {"model": "sums", "parameters": {"weight": sums}},
        ]
        recipe = {"merge_method": "linear", "models": weighed, "dtype": "bfloat16"}
        (work / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    broken = {"merge_method": "passthrough", "slices": slices, "dtype": "bfloat16"}
    (work / "broken.yaml").write_text(yaml.safe_dump(broken))


def compare(work: Path, merge: str, mode: str, threads: int) -> Spent:
    """Compare ``merge`` with the first sibling, on the evidence of ``mode``."""
    home = work / f"home-{mode}"
    before = _documents(home)
    began, used = time.monotonic(), _cpu()
    command = ["compare", "science", merge, "--profile", f"profile-{mode}.yaml", "--json"]
    ended = _mergegate(work, home, command, threads)
    seconds, cpu = time.monotonic() - began, _cpu() - used
    if ended.returncode not in (0, 3):
        raise RuntimeError(ended.stdout + ended.stderr)
    after = _documents(home)
    verdict = json.loads(ended.stdout[ended.stdout.index("{") :])
    return Spent(
        merge=merge,
        mode=mode,
        outcome=str(verdict["content"]["verdict"]["outcome"]),
        documents=after.get(merge, 0),
        reference=after.get("science", 0) - before.get("science", 0),
        seconds=seconds,
        cpu=cpu,
        reason=" / ".join((verdict["content"]["verdict"]["reasons"] or _suite(verdict))[:1]),
    )


def _suite(verdict: Mapping[str, Any]) -> list[str]:
    decided = verdict["content"]["verdict"]
    return [part["reason"] for part in (*decided["suites"], *decided["guards"])]


def _mergegate(work: Path, home: Path, command: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    own = {
        "MERGEGATE_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(PROJECT),
    }
    return subprocess.run(
        [sys.executable, "-c", _START, *command],
        cwd=work,
        env={**kept, **own},
        capture_output=True,
        text=True,
        check=False,
    )


def _documents(home: Path) -> dict[str, int]:
    """Return the number of documents that each model has been scored on, according to the store."""
    found: dict[str, int] = {}
    for value in home.glob("store/evaluate/*/value.json"):
        scores = json.loads(value.read_text())
        part = scores["part"]
        found[scores["model"]] = found.get(scores["model"], 0) + part["last"] - part["first"]
    return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _as_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a math problem into a choice of the right number or an intermediate one of its solution (or a near one)."""
    solution, _, right = str(document["answer"]).rpartition("####")
    right = right.strip()
    rng = random.Random(str(document["question"]))
    passed = [number for number in re.findall(r"=(-?[\d.]+)>>", solution) if number != right]
    wrong = passed[-1] if passed else str(int(float(right.replace(",", ""))) + rng.randint(1, 9))
    choices = [right, wrong] if rng.random() < 0.5 else [wrong, right]
    return {"question": document["question"], "choices": choices, "answer": choices.index(right)}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_models(base: Path | None, data: Path, work: Path, steps: int) -> None:
    """Create those of base, siblings and merges that ``work`` does not contain."""
    texts, rate = models.held_out(data), 3e-5 if base else 3e-4
    base = base or work / "base"
    if not base.exists():
        models.make_base(base, texts, steps=10 * steps, seed=0)
    paragraphs = [page[at : at + 2000] for page in texts.prose[:20] for at in range(0, 8000, 2000)]
    lessons = {"science": texts.science, "sums": [*texts.sums, *paragraphs]}
    for seed, (name, learnt) in enumerate(lessons.items(), start=1):
        if not (work / name).exists():
            own = steps if name == "science" else steps // 2
            models.fine_tune(base, learnt, work / name, steps=own, rate=rate, seed=seed)
    write_recipes(work, int(json.loads((base / "config.json").read_text())["num_hidden_layers"]))
    for name in MERGES:
        if not (work / name).exists():
            merged = _mergegate(work, work / "home-merge", ["merge", f"{name}.yaml", name], threads=1)
            if merged.returncode:
                raise RuntimeError(merged.stdout + merged.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="directory of the documents")
    parser.add_argument("--work", type=Path, required=True, help="directory for models and stores")
    parser.add_argument("--base", type=Path, help="a checkpoint with a tokenizer; absent: one is made")
    parser.add_argument(
        "--steps", type=int, default=40, help="of each fine-tune; of a base that is made ten times that"
    )
    parser.add_argument("--arc", type=int, default=1000)
    parser.add_argument("--gsm8k", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lend", action="store_true", help="all documents go on in a copy of the looks' store")
    given = parser.parse_args()
    work = given.work.absolute()
    write_evidence(given.data, work, {"arc_easy": given.arc, "gsm8k": given.gsm8k})
    make_models(given.base, given.data, work, given.steps)
    lent: dict[str, Spent] = {}
    print("| merge | documents | verdict | scored, merge | scored, sibling | seconds | CPU seconds | says |")
    print("| --- | --- | --- | --: | --: | --: | --: | --- |")
    for mode in ("looks", "all"):
        if mode == "all" and given.lend:
            shutil.copytree(work / "home-looks", work / "home-all", symlinks=True)
        for merge in MERGES:
            spent = compare(work, merge, mode, given.threads)
            if merge in lent:
                before = lent[merge]
                spent = spent._replace(
                    reference=spent.reference + before.reference,
                    seconds=spent.seconds + before.seconds,
                    cpu=spent.cpu + before.cpu,
                )
            elif given.lend:
                lent[merge] = spent
            print(
                f"| {spent.merge} | {spent.mode} | {spent.outcome} | {spent.documents:,} | {spent.reference:,} "
                f"| {spent.seconds:.0f} | {spent.cpu:.0f} | {spent.reason} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
