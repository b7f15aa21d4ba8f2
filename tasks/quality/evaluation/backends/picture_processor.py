"""Load the processor of a vision-language model, and encode prompts with pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.tasks.quality.evaluation.backends.pictures import PicturePrompt


def load_processor(name: str, directory: Path, *, runs_code: bool = False) -> Any:
    """Return the processor of the model ``name`` in ``directory``, which prepares prompts with pictures."""
    from transformers import AutoProcessor, ProcessorMixin

    expected, remedy = "a processor that prepares text and pictures", "copy its files from a parent"
    try:
        processor = AutoProcessor.from_pretrained(str(directory), local_files_only=True, trust_remote_code=runs_code)
        cause = f"a {type(processor).__name__}, which reads no pictures"
    except Exception as error:  # transformers promises no set of types
        processor, cause = None, " ".join(str(error).split())[:300]
        missing = [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]
        if missing and isinstance(error, ImportError):
            cause = f"it needs {missing[0].replace('PIL', 'Pillow')}, which is not installed"
            expected = "the packages of the processor"
            remedy = pip_command("mergegate[pictures]") + (
                " and the torchvision that belongs to your torch (docs/how-to/gate-other-kinds.md)"
                if missing == ["torchvision"]
                else ""
            )
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise InvalidInput(f"{name}: its processor", found=cause, expected=expected, remedy=remedy)
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def encode_prompts(processor: Any, prompts: Sequence[PicturePrompt]) -> Any:
    """Return the inputs of a network for prompts, padded on the left. ``input_ids`` are ``[prompts, length]``."""
    from lm_eval.models.utils import has_bos_prefix

    options: dict[str, Any] = {}
    if has_bos_prefix(prompts[0], processor.tokenizer.bos_token):
        options["add_special_tokens"] = False  # The chat template already added BOS.
    pictures = [[picture.convert("RGB") for picture in prompt.pictures] for prompt in prompts]
    return processor(
        text=[str(prompt) for prompt in prompts], images=pictures, padding=True, return_tensors="pt", **options
    )
