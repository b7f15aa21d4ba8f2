"""Build tiny random networks with transformers: usual small sizes, and keywords that override any of them."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def text_generator(family: str, **settings: Any) -> Any:
    """Return a text generator with random weights.

    Args:
        family: Prefix of the names of its classes in transformers, such as ``Qwen3Moe``.
        settings: Values of its configuration.
    """
    import transformers

    configuration = getattr(transformers, "Llama4TextConfig" if family == "Llama4" else f"{family}Config")
    model = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, model)(configuration(**settings))
