"""Run the backend ``hf``: transformers in the scoring process, with the models of ``hf_models``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mergegate.tasks.models.checkpoints import load_model
from mergegate.tasks.quality.evaluation.backends.contract import Backend, BackendScoring
from mergegate.tasks.quality.evaluation.backends.picture_processor import load_processor

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel, Model


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    with load_model(model, dtype=scoring.dtype, device=device) as loaded:
        lm = wrap_model(loaded, scoring)
        # Only prompts with pictures need the processor, whose packages may be missing.
        lm.open_processor = partial(load_processor, model.name, model.directory, runs_code=model.runs_code)
        yield lm


def wrap_model(loaded_model: LoadedModel, scoring: BackendScoring) -> Any:
    from mergegate.tasks.quality.evaluation.backends import hf_models

    is_causal = not loaded_model.network.config.is_encoder_decoder
    kind: type[Any] = hf_models.SharedPrefixLM if is_causal else hf_models.EncoderDecoderLM
    if is_causal and "pictures" in loaded_model.kind.task_forms:
        kind = hf_models.PictureReaderLM
    return kind(
        pretrained=loaded_model.network,
        tokenizer=copy.deepcopy(loaded_model.tokenizer),  # lm-eval may add a padding token, and other callers share it
        backend="causal" if is_causal else "seq2seq",
        # lm-eval's default, the model's own dtype, rounds a bf16 model's likelihoods by up to half a nat.
        softmax_dtype="float32",
        batch_size=scoring.batch_size,
        max_length=scoring.max_length,
    )


def _generation_settings() -> frozenset[str]:
    from transformers import GenerationConfig

    # lm-eval handles these itself; the limit on tokens has several names.
    lm_eval_settings = ("until", "max_gen_toks", "max_tokens", "max_completion_tokens")
    settings: dict[str, Any] = GenerationConfig().to_dict()
    return frozenset([*settings, *lm_eval_settings])


BACKEND = Backend(
    "hf",
    "transformers here",
    _opened,
    loads_here=True,
    draws_progress=("lm_eval.models.huggingface",),
    computes_in=("answer_row", "_model_call", "_model_generate"),
    encoder_decoders=True,
    reads_pictures=True,
    generation_settings=_generation_settings,
)
