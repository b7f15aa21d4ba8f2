"""Merge variations of the demo family: four skills, fine-tunes of different length, and an alignment that eroded.

The tables are in ``dev/measurements/method-quality.md``.

::

    .venv/bin/python benchmarks/demo_variations.py --work WORK skills     # half an hour each; prints Markdown
    .venv/bin/python benchmarks/demo_variations.py --work WORK lengths
    .venv/bin/python benchmarks/demo_variations.py --work WORK erosion [full | lora | wrong]

``skills`` trains a base with four skills, one fine-tune for each, and merges all four. ``lengths`` fine-tunes the
demo's base on two skills for different numbers of steps. ``WORK`` caches the models.

``erosion`` tests SafeMERGE (https://arxiv.org/abs/2503.17239). The base is the demo's, and the aligned model reverses
letters. A fine-tune of the aligned model learns to shift letters, and reversing erodes. The safe model is the aligned
model after more reversing. SafeMERGE merges the safe model into those matrices where the cosine between the change
``d`` (fine-tune minus aligned) and ``V V' d`` (``V`` = aligned minus base) is smallest. The table compares the half of
the matrices with the smallest cosine, the half with the largest cosine, two random halves, and all tensors.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "profiles" / "demo")]

import language  # noqa: E402 - found next to the demo's trainer

MODELS = PROJECT / "profiles" / "demo" / "models"
METHODS: Mapping[str, dict[str, Any]] = {
    "task_arithmetic": {"weight": None},  # one over the number of models
    "ties": {"weight": 1.0, "density": 0.5},
    "tsv_m": {},
    "wudi": {},
    "ace": {},
}
LENGTHS = ((100, 100), (40, 400), (15, 400), (400, 15))
SHARES = (0.4, 0.6, 0.8, 1.0)
State = Mapping[str, torch.Tensor]
SHIFTING = {"shift": 0.8, "text": 0.2}
# How the fine-tune erodes reversing: full weights, an adapter, or an adapter that also learns wrong answers.
EROSIONS: Mapping[str, dict[str, Any]] = {
    "full": {"mixture": SHIFTING, "steps": 120, "learning_rate": 3e-3},
    "lora": {"mixture": SHIFTING, "steps": 120, "learning_rate": 2e-2},
    "wrong": {
        "mixture": {"shift": 0.6, "text": 0.2, "rev": 0.05, "copy": 0.15},
        "right": {"rev": 0.0},
        "steps": 80,
        "learning_rate": 5e-3,
    },
}


def add_two_skills() -> None:
    """Teach the demo's language two more skills, before its trainer is imported."""
    first, later = language.WORD_LETTERS[0], language.WORD_LETTERS[1:]
    back = str.maketrans(later + first, language.WORD_LETTERS)
    more = {"rot": lambda word: word[1:] + word[:1], "back": lambda word: word.translate(back)}
    language.SKILLS = MappingProxyType({**language.SKILLS, **more})


def cached(path: Path, train: Callable[[], Any]) -> Any:
    """Return the model stored at ``path``, or train and store it."""
    from curriculum import new_model

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train().state_dict(), path)
    model = new_model(0)
    model.load_state_dict(torch.load(path))
    return model


def load_demo(name: str) -> Any:
    """Return a model of the demo family in float32."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)


def exact(model: Any, skills: Sequence[str], items: int) -> list[float]:
    """Return the exact match of each skill in %."""
    from curriculum import exact_match

    return [100 * exact_match(model, skill, items=items, seed=999) for skill in skills]


def merge(work: Path, method: str, base: Any, tuned: Sequence[Any]) -> Any:
    """Merge with mergegate's engine in float32, and return the network."""
    import copy

    from export import Card, write_checkpoint

    from mergegate.merge_core import load_recipe, merge_tensors, open_checkpoint, plan_merge

    own = {key: 1 / len(tuned) if value is None else value for key, value in METHODS[method].items()}
    places = {"base": base, **{f"tuned-{number}": model for number, model in enumerate(tuned)}}
    for name, model in places.items():
        write_checkpoint(work / "merging" / name, model, language.VOCABULARY, Card(name, "apache-2.0", None, ""))
    models = [{"model": name, "parameters": own} if own else {"model": name} for name in list(places)[1:]]
    recipe = load_recipe(
        {"merge_method": method, "base_model": "base", "models": models, "dtype": "float32", "tokenizer_source": "base"}
    )
    plan = plan_merge(recipe, {str(ref): open_checkpoint(work / "merging" / ref.path) for ref in recipe.references()})
    merged = copy.deepcopy(base)
    merged.load_state_dict(dict(merge_tensors(plan)), strict=False)  # tied head
    merged.tie_weights()
    return merged


def print_methods(work: Path, base: Any, tuned: Sequence[Any], skills: Sequence[str], label: str) -> None:
    """Print one row: the exact match of each skill, for each method."""
    cells = []
    for method in METHODS:
        cells.append(" / ".join(f"{share:.0f}" for share in exact(merge(work, method, base, tuned), skills, 400)))
    print(f"| {label} | {' | '.join(cells)} |", flush=True)


def print_skills(work: Path) -> None:
    """Print the merge of four fine-tunes with a skill each."""
    from curriculum import LATENT_SKILLS, specialise, train_base

    base = cached(work / "four/base.pt", lambda: train_base(2, steps=1600))
    tuned = [
        cached(work / f"four/{skill}.pt", lambda skill=skill, number=number: specialise(base, skill, 23 + number))
        for number, skill in enumerate(LATENT_SKILLS)
    ]
    print(f"| skills | {' | '.join(METHODS)} |")
    print_methods(work, base, tuned, (*LATENT_SKILLS, "copy"), " / ".join((*LATENT_SKILLS, "copy")))


def print_lengths(work: Path) -> None:
    """Print merges of two fine-tunes that were trained for different numbers of steps."""
    from curriculum import specialise

    base = load_demo("base")

    def tune(skill: str, steps: int, seed: int) -> Any:
        return cached(work / f"lengths/{skill}-{steps}.pt", lambda: specialise(base, skill, seed, steps=steps))

    print(f"| steps of reversing, of shifting | {' | '.join(METHODS)} |")
    for first, second in LENGTHS:
        tuned = [tune("rev", first, 23), tune("shift", second, 24)]
        print_methods(work, base, tuned, ("rev", "shift", "copy"), f"{first}, {second}")


def fine_tune(name: str, seed: int, **phase: Any) -> Any:
    """Return the demo's reverser after more training, with an adapter of rank 8 unless ``name`` is ``full``."""
    from curriculum import Phase, train

    model = load_demo("reverser")
    if name != "full":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        targets = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    for _ in train(model, Phase(warmup=10, floor=0.1, weight_decay=0.0, **phase), seed):
        pass
    return model if name == "full" else model.merge_and_unload()


def cosine(alignment: torch.Tensor, change: torch.Tensor) -> float:
    """Return the cosine between a change of a matrix and its projection, which need not be normalized."""
    projected = alignment @ (alignment.T @ change)
    return float((projected * change).sum() / (projected.norm() * change.norm()))


def selections(cosines: Mapping[str, float]) -> dict[str, set[str] | None]:
    """Return the matrices that are merged, by the label of the row. None: all tensors."""
    ranked, draw = sorted(cosines, key=cosines.__getitem__), random.Random(0)
    half = len(ranked) // 2
    return {
        "all tensors": None,
        "half with the smallest cosine (SafeMERGE)": set(ranked[:half]),
        "half with the largest cosine": set(ranked[-half:]),
        **{f"random half {number}": set(draw.sample(list(cosines), half)) for number in (1, 2)},
    }


def print_erosion(work: Path, names: Sequence[str]) -> None:
    """Print what merging a safe model into all or some matrices restores, as means over three fine-tunes."""
    base, aligned = load_demo("base").state_dict(), load_demo("reverser").state_dict()
    phase = {"mixture": {"rev": 0.7, "text": 0.2, "copy": 0.1}, "steps": 60, "learning_rate": 5e-4}
    safe = cached(work / "erosion/safe.pt", lambda: fine_tune("full", 31, **phase)).state_dict()
    for name in names or EROSIONS:
        sums: dict[tuple[str, float], list[float]] = {}
        for seed in (1, 2, 3):
            path = work / f"erosion/{name}-{seed}.pt"
            network = cached(path, lambda name=name, seed=seed: fine_tune(name, seed, **EROSIONS[name]))
            tuned = {key: value.clone() for key, value in network.state_dict().items()}
            cosines = {
                key: cosine(aligned[key] - base[key], tuned[key] - aligned[key]) for key in base if "_proj" in key
            }
            print(f"{name} {seed}: {exact(network, ('rev', 'shift'), 200)}, median {sorted(cosines.values())[10]:.2f}")
            for label, chosen in selections(cosines).items():
                for share in SHARES:
                    network.load_state_dict(
                        {
                            key: value + share * (safe[key] - value) if chosen is None or key in chosen else value
                            for key, value in tuned.items()
                        }
                    )
                    sums.setdefault((label, share), []).extend(exact(network, ("rev", "shift"), 200))
        print(f"| {name}: share of the safe model | {' | '.join(f'{share:g}' for share in SHARES)} |")
        for label in dict.fromkeys(label for label, _ in sums):
            cells = [(sums[label, share][::2], sums[label, share][1::2]) for share in SHARES]
            shown = [f"{sum(old) / len(old):.0f} / {sum(new) / len(new):.0f}" for old, new in cells]
            print(f"| {label} | {' | '.join(shown)} |", flush=True)


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("table", choices=("skills", "lengths", "erosion"))
    parser.add_argument("erosions", nargs="*", help=f"some of {', '.join(EROSIONS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.table == "skills":
        add_two_skills()
        print_skills(arguments.work)
    elif arguments.table == "lengths":
        print_lengths(arguments.work)
    else:
        print_erosion(arguments.work, arguments.erosions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
