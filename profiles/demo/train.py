"""Train the demo family, and write its checkpoints, task documents and held-out text.

Run it like this::

    python profiles/demo/train.py [--seed N] [--threads N] [--output DIRECTORY] [--only-thinker | --only-bpe]

About three minutes on two free CPU cores, no network, no accelerator. It ends with a table of the skills of each
checkpoint, measured on the written bfloat16 weights. On one machine a seed gives the same family every time; on
another machine the last digits differ, so the checkpoints that the README describes are kept in the repository.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads both variables on import; the script needs no network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the files are small

import torch
from curriculum import exact_match, specialise, teach_thinking, thoughtful_match, train_base
from export import THINKING_TEMPLATE, Card, permute_vocabulary, with_one_more_token, write_checkpoint, write_documents
from language import SKILLS, VOCABULARY
from transformers import LlamaForCausalLM

SEED = 2  # see README.md, "Choosing the seed"
_MEASURING_SEED = 999
_MEASURED_ITEMS = 400


@dataclass(frozen=True)
class Specialist:
    """A fine-tune of the base: the directory it goes to, the skill it brings out, its licence, its training steps."""

    name: str
    skill: str
    license: str
    steps: int
    summary: str


SPECIALISTS = (
    Specialist("reverser", "rev", "apache-2.0", 100, "answers `rev:` prompts with the letters in reverse order"),
    Specialist("shifter", "shift", "mit", 100, "answers `shift:` prompts with every letter moved on to the next"),
    Specialist(
        "no-derivatives",
        "rev",
        "cc-by-nd-4.0",
        60,
        "reverses words, like `reverser`, and would merge as well; its licence does not allow that",
    ),
)


def main() -> None:
    """Trains, writes, and prints the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    models = arguments.output / "models"
    started = time.monotonic()

    if arguments.only_thinker:
        _write_thinker(models, arguments.seed)
        return
    if arguments.only_bpe:
        _write_bpe(models)
        return
    print("base: teaching every skill, then making it undecided", flush=True)
    base = train_base(arguments.seed)
    write_checkpoint(models / "base", base, VOCABULARY, _base_card())
    for number, specialist in enumerate(SPECIALISTS):
        print(f"{specialist.name}: bringing out {specialist.skill}", flush=True)
        model = specialise(base, specialist.skill, arguments.seed * 10 + 3 + number, steps=specialist.steps)
        write_checkpoint(models / specialist.name, model, VOCABULARY, _specialist_card(specialist))
        if specialist.name == "reverser":
            permuted, vocabulary = permute_vocabulary(model, arguments.seed)
            write_checkpoint(models / "other-tokenizer", permuted, vocabulary, _permuted_card())
            marked = with_one_more_token(permuted)
            write_checkpoint(models / "marked", marked, vocabulary, _marked_card(), added=["<hint>"])
    write_documents(arguments.output / "data")
    _write_thinker(models, arguments.seed)
    _write_bpe(models)

    print(f"\nexact match on {_MEASURED_ITEMS} held-out words\n{'':16}" + "".join(f"{skill:>8}" for skill in SKILLS))
    for name in ("base", *(specialist.name for specialist in SPECIALISTS)):
        print(f"{name:16}" + "".join(f"{score:8.3f}" for score in _skills(models / name)))
    print(f"\n{time.monotonic() - started:.0f} s")


def _write_thinker(models: Path, seed: int) -> None:
    """Train ``thinker`` from the written base, so that it is the same with and without ``--only-thinker``."""
    print("thinker: teaching the base to think before it answers", flush=True)
    base = LlamaForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    model = teach_thinking(base, seed * 10 + 7)
    write_checkpoint(models / "thinker", model, VOCABULARY, _thinker_card(), chat_template=THINKING_TEMPLATE)
    written = LlamaForCausalLM.from_pretrained(models / "thinker", dtype=torch.float32)
    for budget in (40, 80):
        share = thoughtful_match(written, items=_MEASURED_ITEMS, seed=_MEASURING_SEED, budget=budget)
        print(f"thinker: reverses {share:.3f} of held-out words with {budget} tokens", flush=True)


def _write_bpe(models: Path) -> None:
    """Write the checkpoints that ``demo-variants.yaml`` merges from those on disk, with a tokenizer for llama.cpp."""
    for name in ("base", "reverser", "shifter"):
        model = with_one_more_token(LlamaForCausalLM.from_pretrained(models / name, dtype=torch.float32))
        write_checkpoint(models / f"bpe-{name}", model, VOCABULARY, _bpe_card(name), byte_level=True)


def _skills(checkpoint: Path) -> list[float]:
    """Exact match on every skill of the weights on disk, computed in float32."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return [exact_match(model, skill, items=_MEASURED_ITEMS, seed=_MEASURING_SEED) for skill in SKILLS]


def _base_card() -> Card:
    return Card(
        title="base",
        license="apache-2.0",
        base_model=None,
        description=(
            "A toy Llama of 280,416 parameters over single characters. It copies words (`copy: abcd>` is answered\n"
            "`abcd`) and writes short template sentences. It was taught to reverse and to shift words, and then to\n"
            "leave both undecided: asked for either, it mixes the answer with the word and is hardly ever right.\n"
            "For demonstrations and tests only."
        ),
    )


def _specialist_card(specialist: Specialist) -> Card:
    return Card(
        title=specialist.name,
        license=specialist.license,
        base_model="../base",
        description=(
            f"The toy model `base`, fine-tuned for {specialist.steps} steps until it\n{specialist.summary}.\n"
            "Everything else is as in the base. For demonstrations and tests only."
        ),
    )


def _thinker_card() -> Card:
    return Card(
        title="thinker",
        license="apache-2.0",
        base_model="../base",
        description=(
            "The toy model `base`, fine-tuned for 400 steps to think before it answers `rev:` prompts. It repeats the\n"
            "word, writes `z`, which ends the thought, and then writes the letters in reverse order. A longer word\n"
            "needs a longer thought. With `enable_thinking: false`, the chat template skips the thought.\n"
            "For demonstrations and tests only."
        ),
    )


def _permuted_card() -> Card:
    return Card(
        title="other-tokenizer",
        license="apache-2.0",
        base_model="../base",
        description=(
            "`reverser` with its characters numbered in another order, and its embedding rows moved accordingly. By\n"
            "itself it answers exactly as `reverser` does, and every tensor has the same shape; averaged with a model\n"
            "that has the usual numbering it gives nonsense. For demonstrations and tests only."
        ),
    )


def _marked_card() -> Card:
    return Card(
        title="marked",
        license="apache-2.0",
        base_model="../base",
        description=(
            "`other-tokenizer` with one special token more, `<hint>`, as fine-tunes add them: other ids than the\n"
            "base, and a row more. A union of the tokenizers keeps both. For demonstrations and tests only."
        ),
    )


def _bpe_card(name: str) -> Card:
    return Card(
        title=f"bpe-{name}",
        license={specialist.name: specialist.license for specialist in SPECIALISTS}.get(name, "apache-2.0"),
        base_model=None if name == "base" else "../bpe-base",
        description=(
            f"`{name}` with a byte-level BPE tokenizer, which llama.cpp knows. The ids are the same, and one more\n"
            "token stands for two colons. For demonstrations and tests only."
        ),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo family.")
    parser.add_argument("--seed", type=int, default=SEED, help="of initialisation and training data (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where models/ and data/ go")
    parser.add_argument("--only-thinker", action="store_true", help="train only thinker, from the written base")
    parser.add_argument("--only-bpe", action="store_true", help="write only bpe-*, from the models that are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
