"""Quantize a checkpoint with llm-compressor, in a child process that runs in llm-compressor's environment.

::

    python -P quantize_child.py ORDER.json              # started, confined, by ``compressed_tensors``

The order is ``{"model", "output", "scheme", "ignore", "calibration"}``. ``calibration`` is null or
``{"texts", "max_length"}``. The child writes the quantized checkpoint into the directory ``output``. Without a
calibration text, it rounds the weights shard by shard and builds no model. With one, it loads the model, and chooses
integer weights with GPTQ (https://arxiv.org/abs/2210.17323), or measures the scales of the inputs.

This file imports nothing of mergegate, which is not installed in that environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Carry out the order in the file that the command line names."""
    order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    import torch

    # The sums of one thread have a fixed order.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if order["calibration"]:
        _calibrate(order)
    else:
        from llmcompressor import model_free_ptq

        model_free_ptq(order["model"], order["output"], scheme=order["scheme"], ignore=order["ignore"], device="cpu")


def _calibrate(order: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(order["model"], local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(order["model"], local_files_only=True, dtype="auto")
    settings = order["calibration"]
    rows = [
        {"input_ids": ids, "attention_mask": [1] * len(ids)}
        for text in settings["texts"]
        if (ids := tokenizer(text, truncation=True, max_length=settings["max_length"])["input_ids"])
    ]
    modifier = GPTQModifier if order["scheme"].startswith("W") else QuantizationModifier
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=modifier(targets="Linear", scheme=order["scheme"], ignore=order["ignore"]),
        num_calibration_samples=len(rows),
        max_seq_length=settings["max_length"],
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(order["output"], save_compressed=True)


if __name__ == "__main__":
    main()
