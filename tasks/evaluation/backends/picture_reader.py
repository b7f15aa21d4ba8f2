"""Extend the backend ``hf`` to prompts with pictures: a processor prepares both for a vision-language model.

lm-eval's ``hf-multimodal`` answers such requests, too, but it cuts long prompts in the middle of a picture, reports no
ends of answers, and scores no answer choices. Here, requests pass through the code for prompts without pictures, and
only the encoding of a prompt differs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.tasks.evaluation.backends.pictures import PicturePrompt, split_at_placeholders

if TYPE_CHECKING:
    import torch


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


def define_picture_reader(base: type[Any]) -> type[Any]:
    """Return the class ``PictureReaderLM``, a subclass of the ``LM`` for prompts without pictures."""
    from lm_eval.models import huggingface

    class PictureReaderLM(base):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """An ``LM`` that also reads ``PicturePrompt`` objects. ``open_processor`` is set by its creator."""

        MULTIMODAL = True  # for lm-eval
        reads_pictures = False  # whether the current task has pictures, see ``set_up_tasks``
        open_processor: Callable[[], Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._processor: Any = None
            self._lengths: dict[str, int] = {}  # number of tokens by the digest of a prompt

        def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            history = split_at_placeholders(chat_history) if self.reads_pictures else chat_history
            return str(super().apply_chat_template(history, add_generation_prompt))

        def tok_encode(self, string: Any, *args: Any, **kwargs: Any) -> list[int]:
            if not isinstance(string, PicturePrompt):
                return list(super().tok_encode(string, *args, **kwargs))
            if string.digest not in self._lengths:
                self._lengths[string.digest] = self._encode([string])["input_ids"].shape[1]
            return [0] * self._lengths[string.digest]  # for callers that count tokens

        def tok_batch_encode(
            self,
            strings: Sequence[str],
            padding_side: str = "left",
            left_truncate_len: int | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            prompts = [string for string in strings if isinstance(string, PicturePrompt)]
            self.picture_inputs = {}
            if not prompts:
                encoded: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(
                    strings, padding_side, left_truncate_len, **kwargs
                )
                return encoded
            inputs = self._encode(prompts)
            tokens, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
            if left_truncate_len and tokens.shape[1] > left_truncate_len:
                _require_room(tokens.shape[1], left_truncate_len)
            self.picture_inputs = dict(inputs)
            return tokens, mask

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            try:
                return list(super().generate_until(requests, disable_tqdm))
            finally:
                self.picture_inputs = {}

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            if not any(isinstance(request.args[0], PicturePrompt) for request in requests):
                return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))
            answers = []
            bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
            for request in requests:
                prompt, continuation = request.args
                stripped = prompt.rstrip()  # as in lm-eval, spaces belong to the continuation
                start = self._encode([PicturePrompt(stripped, prompt.pictures)])["input_ids"].shape[1]
                inputs = self._encode([PicturePrompt(f"{prompt}{continuation}", prompt.pictures)])
                tokens = inputs.pop("input_ids")
                _require_room(tokens.shape[1], self.max_scored_tokens)
                logits = self._model_call(tokens, picture_inputs=inputs)[0, start - 1 : -1].float()
                targets = tokens[0, start:]
                likelihood = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
                answers.append((float(likelihood), bool((logits.argmax(-1) == targets).all())))
                self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
                bar.update(1)
            bar.close()
            return answers

        def _model_call(
            self, inps: torch.Tensor, *args: Any, picture_inputs: Mapping[str, Any] | None = None, **kwargs: Any
        ) -> torch.Tensor:
            import torch

            if picture_inputs is None:
                return super()._model_call(inps, *args, **kwargs)  # type: ignore[no-any-return]  # untyped
            with torch.inference_mode():
                return self.model(input_ids=inps, **picture_inputs).logits  # type: ignore[no-any-return]

        def _encode(self, prompts: Sequence[PicturePrompt]) -> Any:
            if self._processor is None:
                self._processor = self.open_processor()
            return encode_prompts(self._processor, prompts).to(self.device, self.model.dtype)

    return PictureReaderLM


def _require_room(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise InvalidInput(
            "a prompt with pictures",
            found=f"{tokens:,} tokens, some of which stand for the pictures",
            expected=f"at most {limit:,}: a prompt with pictures is not cut",
            remedy="increase evaluate.max_length if the model supports more, or use smaller pictures",
        )
