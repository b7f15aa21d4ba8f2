"""Backend ``hf``: transformers in the scoring process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mergegate.tasks.checkpoints import load_model
from mergegate.tasks.evaluation.backends.contract import Backend, BackendScoring
from mergegate.tasks.evaluation.backends.shared_prefix import shared_prefix_type

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import LoadedModel, Model


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    with load_model(model, dtype=scoring.dtype, device=device) as loaded:
        yield wrap_model(loaded, scoring)


def wrap_model(loaded: LoadedModel, scoring: BackendScoring) -> Any:
    """Return lm-eval's ``LM`` for a model that is in memory."""
    return shared_prefix_type()(
        pretrained=loaded.network,
        tokenizer=copy.deepcopy(loaded.tokenizer),  # lm-eval may add a padding token, and other callers share it
        backend="causal",
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
    generation_settings=_generation_settings,
)
