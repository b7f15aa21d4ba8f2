"""A family in the demo's language whose heads have the size that vLLM's kernels for CPUs have: 32, not the demo's 24.

A base that writes sentences and copies words, and two fine-tunes of it, kept in ``models/``. They speak, which is all
that serving asks of them. To train them again::

    python tests/serve/served_family.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from variants import DEMO, TEMPLATE

sys.path.insert(0, str(DEMO))
from export import Card, write_checkpoint
from language import BOS, EOS, PAD, TEXT, VOCABULARY, draw, encode

from flows.merging import merge_to

MODELS = Path(__file__).with_name("models")
_CONTEXT = 128


def train_family() -> None:
    """Train and write the three."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    base = LlamaForCausalLM(config)
    _train(base, {TEXT: 0.6, "copy": 0.4}, steps=250, rate=4e-3, seed=1)
    write_checkpoint(MODELS / "base", base, VOCABULARY, _card("base"))
    for seed, (name, mixture) in enumerate(
        {"talker": {TEXT: 1.0}, "copier": {TEXT: 0.3, "copy": 0.7}}.items(), start=2
    ):
        tuned = LlamaForCausalLM(config)
        tuned.load_state_dict(base.state_dict())
        _train(tuned, mixture, steps=25, rate=5e-4, seed=seed)
        write_checkpoint(MODELS / name, tuned, VOCABULARY, _card(name))


def merged(directory: Path) -> Path:
    """The family's merge by our own engine, in ``directory / "merge"``, with a chat template."""
    recipe = directory / "ties.yaml"
    recipe.write_text(
        f"merge_method: ties\nbase_model: {MODELS}/base\ndtype: bfloat16\nparameters: {{density: 0.6, weight: 0.5}}\n"
        f"models: [{{model: {MODELS}/talker}}, {{model: {MODELS}/copier}}]\n"
    )
    merge_to(recipe, directory / "merge", seed=0, device="cpu", share=False, console=Console(quiet=True))
    (directory / "merge" / "chat_template.jinja").write_text(TEMPLATE.replace("rev: ", "copy: "))
    return directory / "merge"


def _train(model: LlamaForCausalLM, mixture: dict[str, float], *, steps: int, rate: float, seed: int) -> None:
    chance = random.Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(steps):
        kinds = chance.choices(list(mixture), weights=list(mixture.values()), k=32)
        rows = [encode(draw(kind, chance, held_out=False))[0] for kind in kinds]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        labels = tokens.masked_fill(tokens == PAD, -100)
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()


def _card(name: str) -> Card:
    return Card(title=name, license="apache-2.0", base_model=None, description="For tests only.")


if __name__ == "__main__":
    train_family()
