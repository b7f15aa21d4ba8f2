"""Measure what ``router_repair`` does to merges of two small mixtures of experts that are trained here.

The tables are in ``dev/measurements/router-repair.md``.

::

    .venv/bin/python benchmarks/router_repair.py                    # three seeds of each setting; prints Markdown
    .venv/bin/python benchmarks/router_repair.py --seeds 1 --settings usual

A Mixtral with 3 layers learns all skills of the demo language and is then made undecided about reversing and shifting.
One fine-tune brings out reversing, the other shifting. The merges are written by ``mergegate.merge``, with and without
``router_repair``. The calibration texts contain words for training. All losses are on held-out words.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import transformers
import yaml

PROJECT = Path(__file__).resolve().parents[1]
DEMO = PROJECT / "profiles" / "demo"
sys.path[:0] = [str(PROJECT), str(DEMO)]

from curriculum import collate  # noqa: E402 - the path is set above
from language import BOS, EOS, PAD, TEXT, VOCABULARY, draw  # noqa: E402 - the path is set above

SKILLS = ("rev", "shift")
PARENTS = ("reverser", "shifter")
_UNDECIDED = 0.4  # share of right answers while the base is undecided
_BATCH, _MEASURED, _CALIBRATION = 48, 400, 200


@dataclass(frozen=True)
class Setting:
    """Architecture and training of one family. ``router_rate`` is a factor of the learning rate of routers."""

    experts: int = 8
    top: int = 2
    balance: float = 0.02
    router_rate: float = 1.0


SETTINGS = {
    "usual": Setting(),
    "fast routers": Setting(router_rate=5.0, balance=0.005),
    "one expert per token": Setting(experts=16, top=1, balance=0.01),
}
METHODS: dict[str, tuple[dict[str, Any], bool]] = {  # parameters of each model, and whether there is a base
    "linear": ({"weight": 0.5}, False),
    "task_arithmetic": ({"weight": 0.8}, True),
    "ties": ({"weight": 1.0, "density": 0.5}, True),
}


def new_model(setting: Setting, seed: int) -> Any:
    """Return an untrained Mixtral with about 0.4 million parameters."""
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, num_local_experts=setting.experts,
        num_experts_per_tok=setting.top, router_aux_loss_coef=setting.balance, output_router_logits=True,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def train(
    model: Any,
    mixture: Mapping[str, float],
    steps: int,
    rate: float,
    seed: int,
    *,
    right: Mapping[str, float] = {},
    router_rate: float = 1.0,
) -> Any:
    """Train ``model`` in place with a cosine schedule, and return it in evaluation mode."""
    rng = random.Random(seed)
    routers = {name for name, _ in model.named_parameters() if ".gate." in name}
    groups = [
        {"params": [one for name, one in model.named_parameters() if (name in routers) == is_router], "factor": factor}
        for is_router, factor in ((False, 1.0), (True, router_rate))
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale * group["factor"]
        kinds = rng.choices(list(mixture), weights=list(mixture.values()), k=_BATCH)
        tokens, labels = collate([draw(kind, rng, held_out=False, right=right.get(kind, 1.0)) for kind in kinds])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(model(input_ids=tokens, labels=labels).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def train_family(setting: Setting, seed: int) -> dict[str, Any]:
    """Return the base and its two fine-tunes, by name."""
    base = new_model(setting, seed)
    train(base, {TEXT: 0.15, "copy": 0.15, "rev": 0.4, "shift": 0.3}, 500, 3e-3, seed)
    undecided = dict.fromkeys(SKILLS, _UNDECIDED)
    train(base, {TEXT: 0.2, "copy": 0.2, "rev": 0.3, "shift": 0.3}, 100, 1.2e-3, seed + 1, right=undecided)
    family = {"base": base}
    for number, (name, skill) in enumerate(zip(PARENTS, SKILLS, strict=True)):
        mixture, rate = {skill: 0.7, TEXT: 0.1, "copy": 0.2}, setting.router_rate
        family[name] = train(copy.deepcopy(base), mixture, 150, 1e-3, seed * 10 + number, router_rate=rate)
    return family


def save(model: Any, directory: Path) -> None:
    """Write a model with the demo's tokenizer."""
    model.config.output_router_logits = False
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((DEMO / "models/base" / file).read_bytes())


@torch.no_grad()
def loss(model: Any, kind: str) -> float:
    """Return the mean loss of held-out answers, in nats per token."""
    rng = random.Random(5)
    tokens, labels = collate([draw(kind, rng, held_out=True) for _ in range(_MEASURED)])
    logits = model(input_ids=tokens).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100))


@torch.no_grad()
def agreement(model: Any, parent: Any, kind: str, top: int) -> float:
    """Return the share of the parent's experts that ``model`` selects on held-out text, each with its own states."""
    rng = random.Random(6)
    tokens, _ = collate([draw(kind, rng, held_out=True) for _ in range(_MEASURED)])
    is_text = (tokens != PAD).flatten()
    shares = []
    both = [one(input_ids=tokens, output_router_logits=True).router_logits for one in (model, parent)]
    for own, target in zip(*both, strict=True):
        selected = own[is_text].topk(top).indices.unsqueeze(1) == target[is_text].topk(top).indices.unsqueeze(2)
        shares.append(float(selected.any(2).float().mean()))
    return statistics.fmean(shares)


def measure_seed(setting: Setting, seed: int, place: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Train one family, merge it with each method, and yield the measurements of each model."""
    import mergegate

    family = train_family(setting, seed)
    for name, model in family.items():
        save(model, place / name)
    for parent, skill in zip(PARENTS, SKILLS, strict=True):
        rng = random.Random(77)
        examples = [draw(skill, rng, held_out=False) for _ in range(_CALIBRATION)]
        lines = [json.dumps({"text": one.prompt + one.answer}) + "\n" for one in examples]
        (place / f"{parent}.jsonl").write_text("".join(lines))

    def measured(model: Any) -> dict[str, float]:
        losses = {kind: loss(model, kind) for kind in (*SKILLS, "copy")}
        pairs = zip(PARENTS, SKILLS, strict=True)
        return losses | {parent: agreement(model, family[parent], skill, setting.top) for parent, skill in pairs}

    for name, model in family.items():
        yield name, measured(model)
    for method, (parameters, has_base) in METHODS.items():
        for is_repaired in (False, True):
            models = [{"model": parent, "parameters": parameters} for parent in PARENTS]
            recipe: dict[str, Any] = {"merge_method": method, "models": models}
            if has_base:
                recipe["base_model"] = "base"
            if is_repaired:
                recipe["router_repair"] = True
                for model, parent in zip(models, PARENTS, strict=True):
                    model["text"] = f"{parent}.jsonl"
            name = f"{method}{', repaired' if is_repaired else ''}"
            file, out = place / "recipe.yaml", place / name.replace(", ", "-")
            file.write_text(yaml.safe_dump(recipe))
            mergegate.merge(file, out, progress=False)
            merged = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
            yield name, measured(merged)


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the means over seeds, and for repairs the number of better seeds."""
    yield "| model | reversing | shifting | copying | mean | experts as in the parents | seeds with a lower mean |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for name, seeds in rows.items():
        losses = [statistics.fmean(one[kind] for one in seeds) for kind in (*SKILLS, "copy")]
        means = [statistics.fmean(one[kind] for kind in (*SKILLS, "copy")) for one in seeds]
        agreed = 100 * statistics.fmean(statistics.fmean(one[parent] for parent in PARENTS) for one in seeds)
        cells = [f"{value:.4f}" for value in (*losses, statistics.fmean(means))]
        better = ""
        if before := rows.get(name.removesuffix(", repaired")) if name.endswith("repaired") else None:
            plain = [statistics.fmean(one[kind] for kind in (*SKILLS, "copy")) for one in before]
            better = f"{sum(new < old for new, old in zip(means, plain, strict=True))} of {len(means)}"
        yield f"| {name} | {' | '.join(cells)} | {agreed:.1f} % | {better} |"


def main() -> None:
    """Measure all settings, and print one table for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # The model process can only read the home in which it started, so all seeds share one.
        os.environ["MERGEGATE_HOME"] = f"{directory}/home"
        for setting in arguments.settings:
            rows: dict[str, list[dict[str, float]]] = {}
            for seed in arguments.seeds:
                started, place = time.monotonic(), Path(directory, f"{setting}-{seed}".replace(" ", "-"))
                for name, result in measure_seed(SETTINGS[setting], seed, place):
                    rows.setdefault(name, []).append(result)
                    print(json.dumps([setting, seed, name, result]), file=sys.stderr)
                print(f"seed {seed}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            print(f"\n{setting}: {SETTINGS[setting]}\n")
            print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
