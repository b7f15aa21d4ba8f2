"""Tiny random models with arbitrary but fixed answers, and documents for them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mergegate.tasks.base.stage.environment import Runtime
from mergegate.tasks.models.checkpoints.model import Model

# Kernels take microseconds, so a second thread only waits, for a long time if the cores are shared.
torch.set_num_threads(1)

LETTERS = "abcdefghijklmnop>:. "
CPU = Runtime(device="cpu", libraries={})

Prefix = Literal["bos added by the tokenizer", "eos only", "neither"]


def make_model(
    directory: Path, *, seed: int = 0, prefix: Prefix = "bos added by the tokenizer", dtype: torch.dtype = torch.float32
) -> Model:
    """Save a random two-layer Llama over single letters in ``directory``."""
    torch.manual_seed(seed)
    special = {"bos added by the tokenizer": ["<s>", "</s>"], "eos only": ["</s>"], "neither": []}[prefix]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *special, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if "<s>" in vocabulary:  # as in Llama 3 and Gemma
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>" if "<s>" in vocabulary else None,
        eos_token="</s>" if "</s>" in vocabulary else None,
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,  # larger than the default, so answers differ clearly
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Model(name=directory.name, digest=f"{directory}", directory=directory)


def words(n: int, seed: int = 0, longest: int = 12) -> list[str]:
    """Return random words over the letters of ``LETTERS``."""
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, longest))) for _ in range(n)]


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_choices(directory: Path, n: int = 40, *, name: str = "letters", extra: str = "") -> Path:
    """Write a multiple-choice task of ``n`` documents that asks which of two letters follows a word."""
    rng = random.Random(5)
    write_jsonl(
        directory / "data" / f"{name}.jsonl",
        ({"word": word, "right": rng.randint(0, 1), "choices": rng.sample("abcd", 2)} for word in words(n)),
    )
    path = directory / f"{name}.yaml"
    path.write_text(
        f"""task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data/{name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{word}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: right
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
{extra}"""
    )
    return path
