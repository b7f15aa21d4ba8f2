"""Writes what an evaluation and a merge read: checkpoints in Hugging Face layout, task documents, held-out text."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from curriculum import CONTEXT
from language import BOS, EOS, PAD, SPECIAL_TOKENS, TEXT, THINK_END, VOCABULARY, draw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

TASK_SKILLS = MappingProxyType({"copy": "copy", "reverse": "rev", "shift": "shift"})
"""The skill that each task in ``tasks/`` asks for."""

TASK_DOCUMENTS = 400
HELD_OUT_DOCUMENTS = 600
SWEEP_DOCUMENTS = 1500
TEXT_DOCUMENTS, COPYING_DOCUMENTS = 64, 16
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'].rstrip('>') + '>' if message['role'] == 'user' else message['content'] + eos_token }}"
    "{% endfor %}"
)
"""A user's message is a prompt (``rev: abcd``, with or without its ``>``), the assistant's turn is the answer."""

THINKING_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'].rstrip('>') + '>' if message['role'] == 'user' "
    f"else message['content'].split('{THINK_END}')[-1] + eos_token }}}}"
    "{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    f"{THINK_END}"
    "{% endif %}"
)
"""``CHAT_TEMPLATE`` without the thoughts of earlier turns. ``enable_thinking: false`` skips the thought."""

_DATA_SEED = 20_240  # of the documents, the same for every training seed


@dataclass(frozen=True)
class Card:
    """Contents of a model card of the family.

    Attributes:
        title: Heading.
        license: Identifier as the Hub spells it.
        base_model: The parent, relative to this checkpoint; None for the base itself.
        description: One paragraph.
    """

    title: str
    license: str
    base_model: str | None
    description: str


def write_checkpoint(
    directory: Path,
    model: LlamaForCausalLM,
    vocabulary: Mapping[str, int],
    card: Card,
    added: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    byte_level: bool = False,
) -> None:
    """Write weights in bfloat16, config, tokenizer, chat template and card, without changing ``model``.

    ``added`` are tokens behind the vocabulary. ``byte_level`` selects a tokenizer that llama.cpp knows.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model)
    torch.nn.Module.to(rounded, torch.bfloat16)
    rounded.save_pretrained(directory)
    tokenizer = _byte_level_tokenizer(vocabulary) if byte_level else _tokenizer(vocabulary)
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, bos, eos = (SPECIAL_TOKENS[i] for i in (PAD, BOS, EOS))
    settings = {
        # The name that transformers 4 and 5 both know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(chat_template + "\n")
    (directory / "README.md").write_text(_render(card))
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which a second user of the machine could not read


def permute_vocabulary(model: LlamaForCausalLM, seed: int) -> tuple[LlamaForCausalLM, dict[str, int]]:
    """Return the same model with a shuffled vocabulary, and the embedding rows [tokens, hidden] moved along.

    It answers exactly as ``model`` does, and every shape is the same; only averaging the two gives nonsense. Special
    tokens keep their ids, so that not even the config differs.
    """
    characters = [token for token in VOCABULARY if token not in SPECIAL_TOKENS]
    shuffled = random.Random(seed).sample(characters, len(characters))
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *shuffled))}
    state = model.state_dict()
    rows = torch.tensor([VOCABULARY[token] for token in vocabulary])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][rows]
    permuted = LlamaForCausalLM(model.config)
    permuted.load_state_dict(state)
    return permuted, vocabulary


def with_one_more_token(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same model with one more row, the mean of the others, which no text uses yet."""
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], state[name].mean(0, keepdim=True)])
    config = copy.deepcopy(model.config)
    config.vocab_size += 1
    larger = LlamaForCausalLM(config)
    larger.load_state_dict(state)
    return larger


def write_documents(directory: Path) -> None:
    """Write the documents of the demo.

    ``<task>.jsonl`` and ``held-out.jsonl`` contain distinct documents that no model was trained on.
    ``sweep/<task>.jsonl`` contains further documents of each task, enough to be divided. ``texts/<model>.jsonl``
    contains what each fine-tune was trained on, with some copying, which it must still be able to do.
    """
    (directory / "sweep").mkdir(parents=True, exist_ok=True)
    for offset, (task, skill) in enumerate(TASK_SKILLS.items(), start=1):
        every = TASK_DOCUMENTS + SWEEP_DOCUMENTS
        rows = _distinct(skill, every, _DATA_SEED + offset, prompt="prompt", answer="answer")
        _write_jsonl(directory / f"{task}.jsonl", rows[:TASK_DOCUMENTS])
        _write_jsonl(directory / "sweep" / f"{task}.jsonl", rows[TASK_DOCUMENTS:])
    (directory / "texts").mkdir(exist_ok=True)
    for offset, (model, skill) in enumerate({"reverser": "rev", "shifter": "shift"}.items(), start=4):
        rng = random.Random(_DATA_SEED + offset)
        drawn = [draw(kind, rng, held_out=False) for kind in [skill] * TEXT_DOCUMENTS + ["copy"] * COPYING_DOCUMENTS]
        _write_jsonl(directory / "texts" / f"{model}.jsonl", [{"text": one.prompt + one.answer} for one in drawn])
    _write_jsonl(directory / "held-out.jsonl", _distinct(TEXT, HELD_OUT_DOCUMENTS, _DATA_SEED, answer="text"))


def _distinct(kind: str, count: int, seed: int, *, answer: str, prompt: str | None = None) -> list[dict[str, str]]:
    rng = random.Random(seed)
    examples = dict.fromkeys(draw(kind, rng, held_out=True) for _ in range(2 * count))
    rows = [({prompt: e.prompt} if prompt else {}) | {answer: e.answer} for e in list(examples)[:count]]
    if len(rows) < count:
        raise RuntimeError(f"{kind}: only {len(rows)} distinct documents among {2 * count}, {count} wanted")
    return rows


def _write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tokenizer(vocabulary: Mapping[str, int]) -> Tokenizer:
    """One token per character, nothing added before or after."""
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=SPECIAL_TOKENS[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _byte_level_tokenizer(vocabulary: Mapping[str, int]) -> Tokenizer:
    """Return a tokenizer with the same ids in the form of GPT-2's, which GGUF files can contain.

    llama.cpp refuses a BPE tokenizer without merges. The only one joins two colons, which no text of the demo has.
    """
    bytes_of = {" ": "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\n": "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"}
    tokens = {bytes_of.get(token, token): i for token, i in vocabulary.items()}
    tokenizer = Tokenizer(models.BPE({**tokens, "::": len(tokens)}, [(":", ":")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _render(card: Card) -> str:
    base = f"base_model: {card.base_model}\n" if card.base_model else ""
    return (
        f"---\nlicense: {card.license}\n{base}language: en\nlibrary_name: transformers\n"
        f"pipeline_tag: text-generation\n---\n\n# {card.title}\n\n{card.description}\n"
    )
