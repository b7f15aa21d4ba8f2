"""Build tiny model families with transformers: a base and two fine-tunes, with a tokenizer trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEXTS = {
    "base": ["the cat sat on the mat", "rain falls on the hills and the rivers rise", "bread is baked in the morning"],
    "sums": ["two and two are four", "three and four are seven", "seven and two are nine, and one more is ten"],
    "verse": ["the moon is a boat on the hills", "the rivers sing and the morning sings", "a cat sings of bread"],
}
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class MadeFamily(NamedTuple):
    """An architecture with the tokenizer, license and chat template that its publisher ships."""

    tokenizer: Callable[[], Any]
    model: Callable[[Any], Any]  # takes the tokenizer
    license: str
    chat: str
    ends: str  # end-of-turn token of the fine-tunes


def _pieces(size: int, byte_level: bool, special: list[str]) -> dict[str, Any]:
    """Train a BPE tokenizer on the texts and return its vocabulary and merges."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>", byte_fallback=not byte_level))
    if byte_level:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        show_progress=False,
    )
    trained.train_from_iterator([line for lines in TEXTS.values() for line in lines], trainer)
    model = json.loads(trained.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _qwen2_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    made = Qwen2Tokenizer(**_pieces(320, True, ["<|endoftext|>"]))
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def _gemma_tokenizer() -> Any:
    from transformers import GemmaTokenizer

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    made = GemmaTokenizer(**_pieces(360, False, ["<pad>", "<eos>", "<bos>", "<unk>", *turns, *bytes_]))
    made.add_special_tokens({"additional_special_tokens": turns})
    return made


def _qwen2(tokenizer: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rows = -(-len(tokenizer) // 64) * 64  # padded like the published models: some rows have no token
    ends = tokenizer.eos_token_id
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=rows, tie_word_embeddings=True, bos_token_id=ends, eos_token_id=ends, **SMALL)
    )


def _gemma2(tokenizer: Any) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(vocab_size=len(tokenizer), head_dim=8, sliding_window=64, **SMALL))


FAMILIES = {
    "qwen2": MadeFamily(_qwen2_tokenizer, _qwen2, "apache-2.0", QWEN_CHAT, "<|im_end|>"),
    "gemma2": MadeFamily(_gemma_tokenizer, _gemma2, "gemma", GEMMA_CHAT, "<end_of_turn>"),
}


def write_family(root: Path, family: MadeFamily, claims: str = "") -> list[str]:
    """Write the models ``base``, ``sums`` and ``verse`` below ``root`` and return their names.

    The base is trained briefly. Each fine-tune starts from it, is trained on its own texts and has a chat template.

    ``claims`` is the dataset that the model cards of the fine-tunes name.
    """
    import torch

    torch.manual_seed(7)
    tokenizer = family.tokenizer()
    model = family.model(tokenizer)
    start: dict[str, Any] = {}
    for name, texts in TEXTS.items():
        model.load_state_dict(start or model.state_dict())
        _train(model.float(), tokenizer, texts)
        model.to(torch.bfloat16)
        if name == "base":
            start = {key: value.clone() for key, value in model.state_dict().items()}
        else:
            tokenizer.chat_template = family.chat
            ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, family.ends])
            model.generation_config.eos_token_id = ends
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        of_base = "" if name == "base" else f"base_model: acme/base\ndatasets: [{claims}]\n"
        card = f"---\nlicense: {family.license}\n{of_base}---\n\n# {name}\n"
        (root / name / "README.md").write_text(card)
    return list(TEXTS)


def _train(model: Any, tokenizer: Any, texts: list[str]) -> None:
    import torch

    steps = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for text in texts * 3:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        steps.step()
        steps.zero_grad()
