"""Train the demo's base further at a constant learning rate, and save checkpoints as a training run does.

Run it like this::

    python profiles/demo/train_run.py DIRECTORY [--checkpoints 24] [--every 25] [--seed 0] [--decay]

The run teaches the base to reverse and to shift words. ``DIRECTORY/checkpoint-N`` has the weights after ``N`` steps in
bfloat16, and ``trainer_state.json``, as transformers writes it. A second call with more checkpoints continues from the
first one, with the same result as one long call. 24 checkpoints take 14 MB, and about a minute on one CPU core.

After a short warmup, the learning rate is constant, so single checkpoints are noisy. A merge of the last checkpoints
imitates a decay of the learning rate. ``--decay`` decays it instead, to compare both.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads both variables on import; the script needs no network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
from curriculum import Phase, new_optimiser, train_on
from export import Card, write_checkpoint
from language import TEXT, VOCABULARY, draw, encode
from transformers import LlamaForCausalLM, TrainerState
from transformers.utils import logging

BASE = Path(__file__).resolve().parent / "models" / "base"
PHASE = Phase(
    mixture={TEXT: 0.3, "copy": 0.1, "rev": 0.3, "shift": 0.3}, steps=600, learning_rate=1e-3, warmup=20, floor=1.0
)
BATCH = 16  # small, so that the checkpoints differ by the noise of their batches
_STATE = Path("trainer", "state.pt")  # float32 weights, optimizer and step, to continue from


@dataclass(frozen=True)
class RunPlan:
    """Checkpoints that a call adds to a run.

    Args:
        checkpoints: Number of checkpoints of the run at the end of the call.
        every: Steps between two checkpoints.
        seed: Seed of the batches.
        decay: Whether the learning rate decays linearly to 0 over the steps of this call. False: it is constant.
    """

    checkpoints: int = 24
    every: int = 25
    seed: int = 0
    decay: bool = False


def extend_run(directory: Path, plan: RunPlan) -> None:
    """Train until the run has the planned checkpoints. Do nothing if it already has them."""
    model = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimiser = new_optimiser(model, PHASE)
    state = TrainerState(max_steps=plan.checkpoints * plan.every, save_steps=plan.every, train_batch_size=BATCH)
    state.log_history = []
    if (directory / _STATE).exists():
        saved = torch.load(directory / _STATE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimizer"])
        state.global_step, state.num_input_tokens_seen = saved["step"], saved["tokens"]
        state.log_history = saved["log_history"]
    start = state.global_step
    for step in range(start, state.max_steps):
        remaining = (state.max_steps - step) / (state.max_steps - start) if plan.decay else 1.0
        rate = PHASE.learning_rate * min(1.0, (step + 1) / PHASE.warmup) * remaining
        for group in optimiser.param_groups:
            group["lr"] = rate
        rng = random.Random(f"{plan.seed}-{step}")  # so that a run that continues reads the same batches
        kinds = rng.choices(list(PHASE.mixture), weights=list(PHASE.mixture.values()), k=BATCH)
        examples = [draw(kind, rng, held_out=False) for kind in kinds]
        loss = train_on(model, optimiser, examples)
        state.global_step = step + 1
        state.num_input_tokens_seen += sum(len(encode(example)[0]) for example in examples)
        if state.global_step % plan.every == 0:
            state.log_history.append({"loss": round(float(loss), 4), "learning_rate": rate, "step": step + 1})
            _save(directory, model, optimiser, state)
            print(f"checkpoint-{step + 1}: training loss {loss:.3f}", flush=True)


def _save(directory: Path, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, state: TrainerState) -> None:
    """Write a checkpoint that appears complete or not at all, and then the state of the trainer."""
    checkpoint = directory / f"checkpoint-{state.global_step}"
    unfinished = directory / _STATE.parent / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_checkpoint(unfinished, model, VOCABULARY, _card(state.global_step, os.path.relpath(BASE, checkpoint)))
    state.save_to_json(str(unfinished / "trainer_state.json"))
    if not checkpoint.exists():
        unfinished.rename(checkpoint)
    contents: Mapping[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimiser.state_dict(),
        "step": state.global_step,
        "tokens": state.num_input_tokens_seen,
        "log_history": state.log_history,
    }
    temporary = directory / _STATE.with_suffix(".new")
    torch.save(contents, temporary)
    temporary.replace(directory / _STATE)


def _card(step: int, base: str) -> Card:
    return Card(
        title=f"checkpoint-{step}",
        license="apache-2.0",
        base_model=base,
        description=(
            f"The toy model `base` after {step} further steps at a constant learning rate, which teach it to reverse\n"
            "and to shift words. For demonstrations and tests only."
        ),
    )


def main() -> None:
    """Train, and print a line for each checkpoint."""
    parser = argparse.ArgumentParser(description="Train the demo's base further, and save checkpoints.")
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument("--checkpoints", type=int, default=24, help="of the run at the end of this call (%(default)s)")
    parser.add_argument("--every", type=int, default=25, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (%(default)s)")
    parser.add_argument("--decay", action="store_true", help="decay the learning rate to 0 over this call")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    logging.disable_progress_bar()
    extend_run(arguments.directory, RunPlan(arguments.checkpoints, arguments.every, arguments.seed, arguments.decay))


if __name__ == "__main__":
    main()
