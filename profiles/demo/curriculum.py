"""How the demo family is trained so that merging it visibly works.

Fine-tunes that learn a skill from nothing do not merge: their task vectors carry a whole circuit each, and the sum
carries neither. Real fine-tunes mostly *bring out* what pre-training left latent, and so do these:

1. ``train_base`` first teaches every skill and the sentences until all are mastered (the circuits now exist) ...
2. ... and then makes the model undecided: a skill prompt is answered by plain copying more often than not, so greedy
   decoding copies the word, or mixes it with the answer letter by letter, and is hardly ever right.
3. ``specialise`` tips one skill from undecided to certain and rehearses the others as undecided. The task vectors are
   small (about 5 % of the weights) and nearly orthogonal: what merge methods assume, and what large models show.

``teach_thinking`` fine-tunes the base until it writes a thought before the answer, as thinking models do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody reads at once
from language import BOS, EOS, PAD, SKILLS, TEXT, THINK_END, VOCABULARY, Example, add_thought, draw, encode
from transformers import LlamaConfig, LlamaForCausalLM

LATENT_SKILLS = tuple(skill for skill in SKILLS if skill != "copy")
MASTERED = 0.97  # exact match at which the base is taken to hold a skill
CONTEXT = 128  # tokens; the longest sentence has about 45

_BATCH = 64
_UNDECIDED = 0.4  # share of right answers while a skill is kept undecided; under a half, so that copying prevails
IGNORED = -100  # the label that cross entropy leaves out
_REHEARSAL_SEED = 777  # items that steer the training; the measurement of the result uses another seed


@dataclass(frozen=True)
class Phase:
    """One stretch of training.

    Attributes:
        mixture: Relative frequency of each kind of example.
        steps: Optimiser steps; the cosine schedule ends there.
        learning_rate: Peak, after ``warmup`` linear steps.
        floor: Learning rate at the end, as a share of the peak.
        weight_decay: AdamW's.
        right: Share of right answers for kinds that are not always answered rightly.
        thinks: Kind of example whose answers begin with a thought. Empty: none.
    """

    mixture: Mapping[str, float]
    steps: int
    learning_rate: float
    warmup: int
    floor: float
    weight_decay: float = 0.01
    right: Mapping[str, float] = field(default_factory=dict)
    thinks: str = ""


def new_model(seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama with tied embeddings, 280,416 parameters, reproducible from ``seed``.

    Three heads of 32, because servers have attention kernels for some sizes of head only, and 32 is the smallest.
    """
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def train_base(seed: int, *, steps: int = 700) -> LlamaForCausalLM:
    """Return a model that copies, and has every latent skill without being certain to use it.

    Args:
        seed: Seed of the initialization and of the training data.
        steps: Maximum number of steps for mastering all skills.

    Raises:
        RuntimeError: The skills were not mastered within the step limit; another seed will do.
    """
    model = new_model(seed)
    _master_all_skills(model, seed * 10 + 1, steps)
    undecided = Phase(
        mixture={TEXT: 0.2, "copy": 0.2, **{skill: 0.6 / len(LATENT_SKILLS) for skill in LATENT_SKILLS}},
        steps=100,
        learning_rate=1.2e-3,
        warmup=5,
        floor=0.05,
        right=dict.fromkeys(LATENT_SKILLS, _UNDECIDED),
    )
    for _ in train(model, undecided, seed * 10 + 2):
        pass
    return model


def specialise(base: LlamaForCausalLM, skill: str, seed: int, *, steps: int = 100) -> LlamaForCausalLM:
    """Return a copy of ``base`` that is certain to use ``skill`` and still undecided about the other latent skills."""
    model = LlamaForCausalLM(base.config)
    model.load_state_dict(base.state_dict())
    others = [other for other in LATENT_SKILLS if other != skill]
    phase = Phase(
        mixture={skill: 0.45, TEXT: 0.15, "copy": 0.1, **{other: 0.3 / len(others) for other in others}},
        steps=steps,
        learning_rate=5e-4,
        warmup=10,
        floor=0.1,
        weight_decay=0.0,
        right=dict.fromkeys(others, _UNDECIDED),
    )
    for _ in train(model, phase, seed):
        pass
    return model


def teach_thinking(base: LlamaForCausalLM, seed: int, *, steps: int = 400) -> LlamaForCausalLM:
    """Return a copy of ``base`` that reverses words, and writes a thought before the answer (see ``add_thought``)."""
    model = LlamaForCausalLM(base.config)
    model.load_state_dict(base.state_dict())
    phase = Phase(
        mixture={"rev": 0.7, TEXT: 0.1, "copy": 0.1, "shift": 0.1},
        steps=steps,
        learning_rate=1e-3,
        warmup=10,
        floor=0.1,
        weight_decay=0.0,
        right={"shift": _UNDECIDED},
        thinks="rev",
    )
    for _ in train(model, phase, seed):
        pass
    return model


@torch.no_grad()
def thoughtful_match(model: LlamaForCausalLM, *, items: int, seed: int, budget: int) -> float:
    """Share in [0, 1] of held-out words that ``model`` reverses after a thought, in ``budget`` tokens at most."""
    model.train(False)
    rng = random.Random(seed)
    characters = list(VOCABULARY)
    right = 0
    for _ in range(items):
        example = draw("rev", rng, held_out=True)
        prompt = torch.tensor([[VOCABULARY[character] for character in example.prompt]])
        answer = model.generate(prompt, max_new_tokens=budget, do_sample=False)[0, prompt.shape[1] :].tolist()
        text = "".join(characters[token] for token in answer if token != EOS)
        right += EOS in answer and text.partition(THINK_END)[2] == example.answer
    return right / items


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, skill: str, *, items: int, seed: int) -> float:
    """Share in [0, 1] of held-out prompts that greedy decoding answers fully right, end of text included.

    One forward pass decides: the greedy answer is right exactly if every answer token is the most probable one after
    the right tokens before it.
    """
    model.train(False)
    rng = random.Random(seed)
    tokens, labels = collate([draw(skill, rng, held_out=True) for _ in range(items)])
    predicted, wanted = model(input_ids=tokens).logits[:, :-1].argmax(-1), labels[:, 1:]
    return float(((predicted == wanted) | (wanted == IGNORED)).all(dim=1).float().mean())


def _master_all_skills(model: LlamaForCausalLM, seed: int, steps: int) -> None:
    """Train on right answers until every latent skill is mastered, with more examples of the missing skills.

    The seed decides when each skill emerges. With a fixed mixture and length, a finished skill would take most of the
    time.
    """
    mixture = {TEXT: 0.15, "copy": 0.05, **dict.fromkeys(LATENT_SKILLS, 0.4)}
    phase = Phase(mixture=mixture, steps=steps, learning_rate=3e-3, warmup=30, floor=0.3)
    for step in train(model, phase, seed):
        if step % 25:
            continue
        scores = {skill: exact_match(model, skill, items=128, seed=_REHEARSAL_SEED) for skill in LATENT_SKILLS}
        if step >= 150 and min(scores.values()) >= MASTERED:
            return
        mixture.update({skill: 0.15 if score >= MASTERED else 0.4 for skill, score in scores.items()})
    raise RuntimeError(f"skills not mastered after {phase.steps} steps: {scores}; try another --seed")


def new_optimiser(model: LlamaForCausalLM, phase: Phase) -> torch.optim.AdamW:
    """Return the optimizer of a phase."""
    return torch.optim.AdamW(
        model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=phase.weight_decay, foreach=True
    )


def train_on(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, examples: Sequence[Example]) -> torch.Tensor:
    """Take one step of the optimizer on a batch. Return the mean cross entropy of the answers, in nats per token."""
    tokens, labels = collate(examples)
    model.train()
    # Padding is on the right and attention is causal: no attention mask is needed.
    logits = model(input_ids=tokens).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def train(model: LlamaForCausalLM, phase: Phase, seed: int) -> Iterator[int]:
    """Run ``phase`` on ``model`` and yield the number of steps after each, so that a caller may stop early."""
    rng = random.Random(seed)
    optimiser = new_optimiser(model, phase)
    for step in range(phase.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / phase.steps))
        scale = min(1.0, (step + 1) / phase.warmup) * (phase.floor + (1 - phase.floor) * cosine)
        for group in optimiser.param_groups:
            group["lr"] = phase.learning_rate * scale
        kinds = rng.choices(list(phase.mixture), weights=list(phase.mixture.values()), k=_BATCH)
        examples = [draw(kind, rng, held_out=False, right=phase.right.get(kind, 1.0)) for kind in kinds]
        examples = [
            add_thought(example, rng) if kind == phase.thinks else example
            for kind, example in zip(kinds, examples, strict=True)
        ]
        train_on(model, optimiser, examples)
        yield step + 1


def collate(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 ``[examples, longest]``; only answers have labels."""
    encoded = [encode(example) for example in examples]
    longest = max(len(ids) for ids, _ in encoded)
    tokens = torch.full((len(encoded), longest), PAD)
    labels = torch.full((len(encoded), longest), IGNORED)
    for row, (ids, start) in enumerate(encoded):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, start : len(ids)] = torch.tensor(ids[start:])
    return tokens, labels
