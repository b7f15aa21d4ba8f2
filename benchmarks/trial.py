"""Measure the time and memory of each part of a sweep's trial: plan, merge, load, score.

::

    .venv/bin/python benchmarks/trial.py --work WORK                        # the demo family
    .venv/bin/python benchmarks/trial.py --work WORK --tokenizer TOKENIZER.json [--layers 30 --hidden 576]

The second command creates a base and two siblings with random weights in Llama layout around an existing tokenizer (by
default with the sizes of a 135 M model). They stay in ``WORK``. Each recipe is tried in a separate process on one
thread. That process scores the model itself instead of in a child, so that its processor time and memory (``VmHWM``)
are visible. The table lists the first trial separately, because it loads libraries, builds the network and tokenizes
the documents. For the other trials, it lists the median. ``--threads`` scores with more threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
DEMO = PROJECT / "profiles" / "demo"
PARTS = ("plan", "merge", "load", "score", "rest")
METHODS = ("linear", "ties", "dare_ties")
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def make_siblings(work: Path, tokenizer: Path, layers: int, hidden: int) -> Path:
    """Create a base and two models near it with random weights, and three tasks over random words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = work / f"siblings-{layers}-{hidden}"
    if (place / "ready").exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    known = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    known.eos_token = known.convert_ids_to_tokens(0)
    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
    )
    for seed, name in enumerate(("base", "reverser", "shifter")):
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)
        torch.manual_seed(seed)
        if seed:
            with torch.no_grad():
                for tensor in network.parameters():
                    tensor += 0.002 * torch.randn_like(tensor)
        network.to(torch.bfloat16).save_pretrained(place / "models" / name)
        known.save_pretrained(place / "models" / name)
    rng = random.Random(0)
    words = [word for word in (place / "models/base/tokenizer.json").read_text().split('"') if word.isalpha()][:2000]
    (place / "tasks").mkdir()
    for name in ("copy", "reverse", "shift"):
        (place / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name))
        rows = [
            {"prompt": " ".join(rng.choices(words, k=24)), "answer": " " + " ".join(rng.choices(words, k=4))}
            for _ in range(1000)
        ]
        (place / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "ready").touch()
    return place


def family_of(place: Path, documents: int, work: Path) -> Path:
    """Return the family's tasks with ``documents`` documents each."""
    own = work / f"{place.name}-{documents}"
    if not own.exists():
        shutil.copytree(place / "tasks", own / "tasks")
        if (place / "data").exists():
            shutil.copytree(place / "data", own / "data")
        for file in own.rglob("*.jsonl"):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:documents]))
    return own


def recipe_of(models: Path, method: str, weight: float) -> dict[str, Any]:
    """Return the recipe of one candidate."""
    parameters = {"weight": weight} if method == "linear" else {"weight": weight, "density": 0.5}
    recipe: dict[str, Any] = {
        "merge_method": method,
        "models": [{"model": str(models / name), "parameters": parameters} for name in ("reverser", "shifter")],
        "dtype": "bfloat16",
    }
    return recipe if method == "linear" else {**recipe, "base_model": str(models / "base")}


def measure(place: Path, tasks: Path, method: str, trials: int, threads: int) -> dict[str, Any]:
    """Return the CPU seconds of the parts of a trial and the peak memory, for the first trial and for the others."""
    from mergegate.merge_core import load_recipe
    from mergegate.merge_core.files import HashMemo
    from mergegate.tasks.models.checkpoints import pin_checkpoints, resolve_parents
    from mergegate.tasks.quality.evaluation import Scoring, pin_task
    from mergegate.tasks.sweep import trial
    from mergegate.tasks.sweep.objective import MetricKey

    def ask_here(function: Callable[..., Any], arguments: tuple[object, ...], **_: object) -> Any:
        return function(*arguments, lambda done, total: None)

    vars(trial)["call_model_process"] = ask_here
    vars(trial)["time"] = SimpleNamespace(perf_counter=time.process_time)
    hashes = HashMemo(tasks / "hashes.db")
    parents = pin_checkpoints(resolve_parents(load_recipe(recipe_of(place / "models", "ties", 1.0))), hashes)
    names = ("copy", "reverse", "shift")
    pinned = tuple(pin_task(f"tasks/{name}.yaml", tasks, hashes) for name in names)
    setting = trial.TrialSetting(
        parents=parents,
        sets={"search": trial.TrialSet(pinned)},
        metric_keys=tuple(MetricKey(name, "log_likelihood") for name in names),
        scoring=Scoring(),
        threads=threads,
    )
    seconds: list[Mapping[str, float]] = []
    memory: list[int] = []
    for number in range(trials + 1):
        Path("/proc/self/clear_refs").write_text("5")
        found = trial.score_trial(setting, trial.TrialRequest(recipe_of(place / "models", method, 1 - 0.02 * number)))
        assert not found.problem, found.problem
        assert found.seconds is not None
        seconds.append(found.seconds)
        memory.append(_high_water())
    later = seconds[1:]
    parts = {part: statistics.median(one.get(part, 0.0) for one in later) for part in PARTS if part != "rest"}
    whole = statistics.median(sum(one.values()) for one in later)
    return {
        "first": sum(seconds[0].values()),
        "parts": {**parts, "rest": max(0.0, whole - sum(parts.values()))},
        "whole": whole,
        "memory": [memory[0], max(memory[1:])],
        "model": sum(file.stat().st_size for file in (place / "models/base").glob("*.safetensors")),
    }


def _high_water() -> int:
    """Return the peak resident bytes since the mark was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--documents", type=int, default=100, help="of each of three tasks")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    place = make_siblings(work, given.tokenizer, given.layers, given.hidden) if given.tokenizer else DEMO
    tasks = family_of(place, given.documents, work)
    if given.one:
        print(json.dumps(measure(place, tasks, given.one, given.trials, given.threads)))
        return
    print("| method | plan | merge | load | score | rest | a trial | the first | weights | memory: first | further |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "PYTHONPATH": str(PROJECT)}
    environment |= {"MERGEGATE_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1"}
    for method in given.methods.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(said.splitlines()[-1])
        parts = " | ".join(_time(found["parts"][part]) for part in PARTS)
        first, further = (f"{bytes_ / 2**20:.0f} MiB" for bytes_ in found["memory"])
        weights = f"{found['model'] / 2**20:.1f} MiB"
        both = f"{_time(found['whole'])} | {found['first']:.1f} s"
        print(f"| {method} | {parts} | {both} | {weights} | {first} | {further} |", flush=True)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
