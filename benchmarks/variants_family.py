"""Train a small language model on a text, and write a family with a profile for ``benchmarks/variants.py``.

::

    python benchmarks/variants_family.py TEXT.jsonl OUT            # about 12 minutes on one core

The first key of each JSON line is a page of text. Two thirds of the pages train a Llama model of 4.2 M parameters with
its own byte-level BPE tokenizer, and two fine-tunes of it, one for each half of these pages. The other pages become the
documents of the task and the held-out text. Its shapes allow every quantization type of llama.cpp: the rows of all
matrices have 256 or 768 elements.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
VOCABULARY, CONTEXT, BATCH = 4096, 128, 16
BASE_EPOCHS, TUNE_EPOCHS = 5, 1
# Words of an item: the prompt and each of four endings. An ending that does not follow the prompt is from another page.
PROMPT_WORDS, ENDING_WORDS, CHOICES = 30, 8, 4
DOCUMENT_WORDS = 250  # words of a held-out document
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"

PROFILE = """\
name: small
recipe: recipe.yaml
checks: {license: {purpose: commercial, visibility: public}}
perplexity: {documents: held-out.jsonl, max_length: 128}
evaluate:
  dtype: float32
  documents: all
  tasks:
    - {task: ending.yaml, guarded_by: best parent, max_drop: 2, margin: 3}
variants:
  - {format: gguf, types: [Q8_0, Q6_K, Q4_K_M, Q4_0]}
  - {format: compressed-tensors, scheme: FP8_DYNAMIC}
publish: {to: directory, path: releases/small}
"""
RECIPE = """\
merge_method: linear
models:
  - {model: first, parameters: {weight: 0.5}}
  - {model: second, parameters: {weight: 0.5}}
dtype: bfloat16
"""
TASK = """\
# Chooses the words that follow a passage, out of four.
task: ending
dataset_path: json
dataset_kwargs: {data_files: {test: ending.jsonl}}  # relative to this file
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{endings}}"
doc_to_target: answer
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


def main() -> None:
    """Train and write the family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with arguments.text.open(encoding="utf-8") as lines:
        pages = [str(next(iter(json.loads(line).values()))) for line in lines]
    held_out, train = pages[::3], [page for at, page in enumerate(pages) if at % 3]
    arguments.out.mkdir(parents=True)
    write_documents(arguments.out, held_out)
    for name, text in (("profile.yaml", PROFILE), ("recipe.yaml", RECIPE), ("ending.yaml", TASK)):
        (arguments.out / name).write_text(text, encoding="utf-8")

    tokenizer = train_tokenizer(train)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    fit(model, tokenizer, train, BASE_EPOCHS, 2e-3, "base")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(arguments.out / "base", model, tokenizer)
    for name, half in (("first", train[::2]), ("second", train[1::2])):
        model.load_state_dict(base)
        fit(model, tokenizer, half, TUNE_EPOCHS, 3e-4, name)
        write_model(arguments.out / name, model, tokenizer)


def write_documents(out: Path, pages: Sequence[str]) -> None:
    """Write the documents of the task and the held-out text. No two documents of the task share a word."""
    chance = random.Random(SEED)
    words = [page.split() for page in pages]
    span = PROMPT_WORDS + ENDING_WORDS
    passages = [
        (at, page[start : start + span]) for at, page in enumerate(words) for start in range(0, len(page) - span, span)
    ]
    items = []
    for at, passage in passages:
        others: list[str] = []
        while len(others) < CHOICES - 1:
            page, other = chance.choice(passages)
            if page != at:
                others.append(" ".join(other[PROMPT_WORDS:]))
        answer = chance.randrange(CHOICES)
        endings = [*others[:answer], " ".join(passage[PROMPT_WORDS:]), *others[answer:]]
        items.append({"prompt": " ".join(passage[:PROMPT_WORDS]), "endings": endings, "answer": answer})
    texts = [
        {"text": " ".join(page[start : start + DOCUMENT_WORDS])}
        for page in words
        for start in range(0, len(page) - DOCUMENT_WORDS, DOCUMENT_WORDS)
    ]
    for name, rows in (("ending.jsonl", items), ("held-out.jsonl", texts)):
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(pages: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer with the pre-tokenizer of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pages, trainer)
    return tokenizer


def fit(
    model: LlamaForCausalLM, tokenizer: Tokenizer, pages: Sequence[str], epochs: int, rate: float, name: str
) -> None:
    """Train ``model`` on random windows of ``pages``, with a learning rate that falls to a tenth."""
    stream = torch.tensor([token for page in pages for token in (0, *tokenizer.encode(page).ids)])
    steps = epochs * len(stream) // (CONTEXT * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1, final_div_factor=2
    )
    chance = torch.Generator().manual_seed(SEED)
    began = time.monotonic()
    model.train()
    for step in range(steps):
        starts = torch.randint(len(stream) - CONTEXT, (BATCH,), generator=chance)
        batch = torch.stack([stream[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"{name}: step {step + 1} of {steps}, loss {loss.item():.2f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval()


def write_model(directory: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write a checkpoint in bfloat16 with its tokenizer and a model card."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", model_max_length=512
    )
    wrapped.chat_template = CHAT_TEMPLATE
    model.to(torch.bfloat16).save_pretrained(directory)
    model.to(torch.float32)
    wrapped.save_pretrained(directory)
    (directory / "README.md").write_text(
        "---\nlicense: cc-by-sa-4.0\n---\nA small model for a benchmark.\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
