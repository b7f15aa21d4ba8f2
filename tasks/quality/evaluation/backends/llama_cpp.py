"""Run the backend ``llama_cpp``: GGUF variants in llama.cpp, with the tokenizer of the model that was quantized.

Everything around the network is that of the backend ``hf``: tokens, truncated prompts, stop strings, thoughts and the
settings of generated answers. llama.cpp receives tokens. It computes every request alone and always in the same
batches, so an answer does not depend on other requests, on their order, or on an interruption (``llama_cpp``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.llama_cpp import AnswerChoice, LlamaCpp, load_gguf, runs_in_llama_cpp
from mergegate.tasks.quality.evaluation.backends.contract import Backend, BackendScoring

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.models.checkpoints import LoadedModel, Model
    from mergegate.tasks.quality.evaluation.backends.hf_models import RequestTokens

# Number of tokens between two checks for stop strings.
_STEP = 32
# Settings of an answer with the meaning that they have in transformers, which also supplies their defaults.
_CHOICES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@cache
def gguf_type() -> type[Any]:
    """Return the class ``GgufLM``, defining it on the first call so that lm-eval is imported only on demand."""
    from mergegate.tasks.quality.evaluation.backends.hf_models import SharedPrefixLM, huggingface

    class GgufLM(SharedPrefixLM):
        """lm-eval's ``LM`` for a ``GgufNetwork``."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            # A request that is repeated has one object. The number of an answer among its repetitions selects its
            # random numbers. An interrupted run has the answers of the first repetitions already.
            counts: dict[int, int] = defaultdict(int)
            for request in requests:
                counts[id(request)] += 1
            self._numbers: dict[str, deque[int]] = defaultdict(deque)
            for request in requests:
                number = (request.repeats or 1) - counts[id(request)]
                counts[id(request)] -= 1
                self._numbers[request.args[0]].append(max(0, number))
            return super().generate_until(requests, disable_tqdm)  # type: ignore[no-any-return]

        def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> Any:
            self._prompt = strings[0]
            return super().tok_batch_encode(strings, *args, **kwargs)

        def _loglikelihood_tokens(
            self, requests: list[RequestTokens], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            longest = self.max_scored_tokens
            cut: list[tuple[list[int], list[int]]] = []
            for _, context, continuation in requests:
                if len(continuation) >= longest:
                    raise InvalidInput(
                        str(self._gguf.path),
                        found=f"an answer of {len(continuation):,} tokens and a context of {longest - 1:,}",
                        expected="answers that are shorter than the context",
                        remedy="increase evaluate.max_length",
                    )
                cut.append((context[-(longest - len(continuation)) :], continuation))

            # llama.cpp continues where the next request differs from the last one. Requests that need caches of equal
            # size follow each other, the largest first, so that memory runs out immediately or never.
            def position(number: int) -> tuple[int, tuple[list[int], list[int]]]:
                context, continuation = cut[number]
                return -(len(context) + len(continuation) - 2).bit_length(), cut[number]

            order = sorted(range(len(cut)), key=position)
            answers: dict[int, tuple[float, bool]] = {}
            bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
            for context, group in groupby(order, key=lambda index: cut[index][0]):
                numbers = list(group)
                for number, answer in zip(
                    numbers, self.score_answers(context, [cut[number][1] for number in numbers]), strict=True
                ):
                    answers[number] = answer
                    if (texts := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update(1)
            bar.close()
            return [answers[number] for number in range(len(requests))]

        def score_answers(
            self, context: Sequence[int], continuations: Sequence[Sequence[int]]
        ) -> list[tuple[float, bool]]:
            """Return the log-probability of each continuation in nats, and whether it is the argmax."""
            scores = (self._gguf.log_probabilities(context, continuation) for continuation in continuations)
            return [(score.total, score.greedy) for score in scores]

        def _generate_batch(
            self,
            context: torch.Tensor,
            max_length: int,
            stop: list[str],
            attention_mask: torch.Tensor | None,
            **settings: Any,
        ) -> torch.Tensor:
            import torch

            (prompt,) = context.tolist()  # of a single request, because ``batch_size`` is 1
            numbers = self._numbers[self._prompt]
            choice = self._choice(settings, numbers.popleft() if numbers else 0)
            strings = [text for text in stop if text]
            answer: list[int] = []
            budget = max_length - len(prompt)
            while len(answer) < budget and not (answer and answer[-1] in choice.ends):
                count = min(_STEP, budget - len(answer))
                answer += self._gguf.generate(prompt, choice, count, room=max_length, answer=answer)
                if self._has_stopped(answer, strings):
                    break
            return torch.tensor([[*prompt, *answer]])

        def _choice(self, settings: Mapping[str, Any], number: int) -> AnswerChoice:
            """Return how the tokens of an answer are chosen: by ``settings``, or else as transformers would."""
            values: dict[str, Any] = {}
            for name in _CHOICES:
                value = settings.get(name, getattr(self.model.generation_config, name, None))
                if value is not None:
                    values[name] = value
            if not settings.get("do_sample"):
                values["temperature"] = 0.0
            return AnswerChoice(ends=tuple(sorted(self._eos | {self.eot_token_id})), seed=number, **values)

        @property
        def _gguf(self) -> LlamaCpp:
            return self.model.gguf  # type: ignore[no-any-return]

    return GgufLM


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    if not runs_in_llama_cpp(model):
        raise InvalidInput(
            f"evaluate.backend: llama_cpp, for {model.name} ({model.directory})",
            found="a checkpoint in safetensors",
            expected="a GGUF variant",
            remedy="use backend: hf, and list the GGUF types to evaluate and publish under 'variants'",
        )
    with load_gguf(model) as loaded:
        yield wrap_gguf(loaded, scoring)


def wrap_gguf(loaded_model: LoadedModel, scoring: BackendScoring) -> Any:
    import copy

    return gguf_type()(
        pretrained=loaded_model.network,
        tokenizer=copy.deepcopy(loaded_model.tokenizer),  # lm-eval may add a padding token
        backend="causal",
        batch_size=1,
        max_length=scoring.max_length,
    )


def _generation_settings() -> frozenset[str]:
    # lm-eval handles the first ones itself; the limit on tokens has several names.
    budgets = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    return frozenset(["until", *budgets, "do_sample", *_CHOICES])


BACKEND = Backend(
    "llama_cpp",
    "llama.cpp here, for GGUF variants",
    _opened,
    draws_progress=("lm_eval.models.huggingface",),
    computes_in=("score_answers", "_model_generate"),
    variants_only=True,
    generation_settings=_generation_settings,
)
