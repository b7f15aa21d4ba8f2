"""Train two sibling fine-tunes of one base with a real tokenizer, for ``benchmarks/siblings.py``.

The base is an existing checkpoint, or one trained here: a byte-pair tokenizer of 8,192 tokens and a small Llama, both
trained on held-out text. One sibling then learns science questions (ARC), the other math problems and prose (GSM8K,
WikiText-2). No document is used for both training and scoring.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCORED_ARC, SCORED_GSM8K, SCORED_PAGES = 1000, 400, 24  # documents from the start of each file; the rest trains
PAGE = 2000  # characters of a page of WikiText that perplexity is computed over
BATCH, LENGTH = 4, 192  # texts of a step, tokens of each


class Texts(NamedTuple):
    """Training texts: every document that is not scored."""

    science: list[str]
    sums: list[str]
    prose: list[str]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all documents of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_out(data: Path) -> Texts:
    """Return the texts of ``data`` that no task scores: ARC-Challenge and the end of the other files."""
    arc = [*read_lines(data / "arc_challenge_test.jsonl"), *read_lines(data / "arc_easy_test.jsonl")[SCORED_ARC:]]
    sums = read_lines(data / "gsm8k_test.jsonl")[SCORED_GSM8K:]
    pages = read_lines(data / "wikitext2_test_docs.jsonl")[SCORED_PAGES:]
    return Texts(
        science=[f"Question: {one['question']}\nAnswer: {one['choices'][one['answer']]}" for one in arc],
        sums=[f"Question: {one['question']}\nAnswer: {one['answer'].rpartition('####')[2].strip()}" for one in sums],
        prose=[str(page["page"]) for page in pages],
    )


def make_base(out: Path, texts: Texts, steps: int, seed: int) -> Path:
    """Train a tokenizer and a small Llama (6 M parameters) from scratch on the held-out texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    every = [*texts.prose, *texts.science, *texts.sums]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        every, trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _train(LlamaForCausalLM(config), tokenizer, every, out, steps=steps, rate=1e-3, seed=seed)


def fine_tune(base: Path, texts: Sequence[str], out: Path, *, steps: int, rate: float, seed: int) -> Path:
    """Train ``base`` for ``steps`` steps on ``texts``, and save it as bfloat16 with the base's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    return _train(network, tokenizer, texts, out, steps=steps, rate=rate, seed=seed)


def _train(
    network: Any, tokenizer: Any, texts: Sequence[str], out: Path, *, steps: int, rate: float, seed: int
) -> Path:
    import torch

    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    for step, ids in zip(range(steps), _batches(tokenizer, texts, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 5, (steps - step) / (0.4 * steps))
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"  {out.name} step {step + 1}/{steps}: {float(loss):.3f} nats per token", flush=True)
    network.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _batches(tokenizer: Any, texts: Sequence[str], seed: int) -> Iterator[Any]:
    """Yield endless batches of ``[BATCH, LENGTH]`` token ids, cut from the texts in random order."""
    import torch

    rng, waiting = random.Random(seed), list[int]()
    while True:
        for text in rng.sample(texts, len(texts)):
            waiting += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            while len(waiting) >= BATCH * LENGTH:
                yield torch.tensor(waiting[: BATCH * LENGTH]).view(BATCH, LENGTH)
                del waiting[: BATCH * LENGTH]
