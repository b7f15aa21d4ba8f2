"""Run the backend ``vllm``: vLLM in the scoring process, which requires vllm and mergegate in one environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.quality.evaluation.backends.answer_ends import (
    CUT_OFF,
    AnswerEnd,
    AnswerReason,
    ThoughtEnd,
    first_stop,
)
from mergegate.tasks.quality.evaluation.backends.contract import Backend, BackendScoring

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import Model


class VllmSettings(BaseModel):
    """Settings for running a model with vLLM, in a profile under ``evaluate.vllm``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Number of GPUs over which a model is split. Default: 1."
    )
    gpu_memory_utilization: Annotated[float, NotInKey] = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of GPU memory for vLLM, below its own default of 0.9 because log-probabilities of prompts "
        "need additional memory. Default: 0.8.",
    )


_engine: tuple[tuple[str, BackendScoring], Any] | None = None


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    """Yield lm-eval's vLLM model. The engine stays loaded for the next part and ends with the process."""
    global _engine
    if _engine is not None and _engine[0] == (model.digest, scoring):
        yield _engine[1]
        return
    try:
        from lm_eval.models.vllm_causallms import VLLM
    except ImportError as error:
        raise InvalidInput(
            "evaluate.backend: vllm",
            found=f"vLLM cannot be imported here: {error}",
            expected="mergegate and vllm in the same environment",
            remedy="install vllm there, or serve the models and use backend: served",
        ) from error

    class RecordingVllm(VLLM):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """lm-eval's vLLM model, which also records how answers ended."""

        _thought_end: ThoughtEnd | None = None
        _stops: tuple[list[str], ...] = ()  # stop strings of the requests in the next batch

        @property
        def thought_end(self) -> ThoughtEnd | None:
            return self._thought_end

        @thought_end.setter
        def thought_end(self, thought_end: ThoughtEnd | None) -> None:
            self._thought_end = thought_end
            self.think_end_token = thought_end and thought_end.end

        @property
        def max_scored_tokens(self) -> int:
            return int(self.max_length) - 1

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            # As backend hf does: lm-eval's own method would pass enable_thinking: null if it is not set.
            from lm_eval.models.huggingface import HFLM

            arguments = {**self.chat_template_args, "chat_template": self.hf_chat_template}
            reader = SimpleNamespace(tokenizer=self.tokenizer, chat_template_args=arguments)
            return str(HFLM.apply_chat_template(reader, chat_history, add_generation_prompt))

        def modify_gen_kwargs(self, *args: Any, **kwargs: Any) -> Any:
            settings = super().modify_gen_kwargs(*args, **kwargs)
            self._stops = (*self._stops, settings[1])
            return settings

        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super()._model_generate(*args, **kwargs)
            if kwargs.get("generate"):
                self.answer_ends = deque[AnswerEnd]()
                stops, self._stops = self._stops or ([],) * len(outputs), ()
                for output, params, stop in zip(outputs, kwargs["sampling_params"], stops, strict=False):
                    answer, limit = output.outputs[0], params.max_tokens
                    tokens = len(answer.token_ids)
                    reason: AnswerReason = ""
                    if answer.finish_reason == "stop":  # by a text, a token id, or None for the model's own end token
                        reason = "stop" if isinstance(answer.stop_reason, str) else "eos"
                    elif answer.finish_reason == "length":
                        reason = "context" if limit is not None and tokens < limit else "length"
                    end = AnswerEnd(reason, tokens)
                    self.answer_ends.append(end if self.thought_end is None else self._finish(answer, end, stop))
            return outputs

        def _finish(self, answer: Any, end: AnswerEnd, stop: list[str]) -> AnswerEnd:
            """Apply the stop strings that lm-eval withholds from vLLM while a model thinks, and return the new end."""
            assert self.thought_end is not None
            ids, decode = list(answer.token_ids), partial(self.tokenizer.decode, skip_special_tokens=True)
            if (stopped := first_stop(ids, stop, lambda tokens: [decode(tokens)], self.thought_end)) is not None:
                end, ids = AnswerEnd("stop", stopped), ids[:stopped]
                answer.text = decode(ids)
            thinking = self.thought_end.length(ids, decode, is_cut_off=end.reason in CUT_OFF)
            if self.thought_end.token in ids:
                answer.text = decode(ids[thinking:]).lstrip()
            return end._replace(thinking=thinking)

    settings = scoring.own_settings if isinstance(scoring.own_settings, VllmSettings) else VllmSettings()
    try:
        lm = RecordingVllm(
            pretrained=str(model.directory),
            dtype=scoring.dtype,
            max_length=scoring.max_length,
            batch_size=scoring.batch_size,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            trust_remote_code=model.runs_code,
        )
    except Exception as error:
        # The many layers of an engine raise exceptions of many types.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found=f"vLLM cannot load it: {cause[:300]}",
            remedy="reduce max_length or evaluate.vllm.gpu_memory_utilization, or use more GPUs (tensor_parallel_size)",
        ) from error
    _engine = ((model.digest, scoring), lm)
    yield lm


BACKEND = Backend(
    "vllm",
    "vLLM here",
    _opened,
    settings="vllm",
    libraries=("vllm",),
    frees_memory=False,  # workers and caches of an engine outlive it
    draws_progress=("lm_eval.models.vllm_causallms",),
    computes_in=("_model_generate",),
)
