"""Run the backend ``hf``: transformers in the scoring process, computing tokens that requests share only once.

lm-eval runs the model over the prompt and answer of every request, padded to the longest of the batch, and takes the
log-softmax at every position. ``SharedPrefixLM`` extends its ``HFLM``: it packs requests into rows
(:mod:`.shared_prefix`), and only positions whose next token is requested go through the output head. The results equal
those of separate sequences except for the last digits, which also depend on the batch size.

This works only for a network in which positions and the attention mask alone determine what a token attends to. Most
networks qualify. Networks that carry a state from token to token (Mamba, RWKV) or count positions themselves (BLOOM)
do not. Each network is therefore tested first: a sequence must have the same logits in a row as alone, whatever else
is in the row. lm-eval's own code scores sequences long enough for windowed attention or scaled rotary embeddings.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.architecture import text_part
from mergegate.tasks.checkpoints import load_model
from mergegate.tasks.evaluation.backends.answer_ends import AnswerEnd, ThoughtEnd, answer_end
from mergegate.tasks.evaluation.backends.contract import Backend, BackendScoring
from mergegate.tasks.evaluation.backends.encoder_decoder import define_encoder_decoder
from mergegate.tasks.evaluation.backends.picture_reader import define_picture_reader, load_processor
from mergegate.tasks.evaluation.backends.shared_prefix import SharedRow, cache_prompts, row_inputs, token_rows

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.checkpoints import LoadedModel, Model

# Number of tokens between two checks for finished answers.
_STEP = 32
# Tokens in a row per request of the batch size: about the length of a short question.
_TOKENS_PER_REQUEST = 24
# Number of positions whose logits are normalized together.
_LOGIT_ROWS = 16
# Types of rotary embeddings that depend on the length of the batch.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Tokens at the beginning of every sequence that tests a network.
PROBE_TOKENS = (5, 9, 6, 8, 7)
# Generation settings that choose a token from the logits of a single sequence.
_SINGLE_SEQUENCE = {"use_cache", "do_sample", "temperature", "top_k", "top_p", "min_p"}
# Settings in a model's generation configuration whose effect would change if an answer is generated in steps.
_COUNTED = (
    "cache_implementation",
    "min_length",
    "min_new_tokens",
    "forced_eos_token_id",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
)
# Exceptions that a network raises for inputs that it does not support.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)

RequestTokens = tuple[tuple[str, str], list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


@cache
def shared_prefix_type() -> type[Any]:
    """Return the class ``SharedPrefixLM``, defining it on the first call so that lm-eval is imported only on demand."""
    from lm_eval.models import huggingface

    class SharedPrefixLM(huggingface.HFLM):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """An ``HFLM`` that computes tokens shared by several requests once, wherever this does not change results."""

        answer_ends: deque[AnswerEnd]  # ends of the last batch, see ``AnswerEnd``
        picture_inputs: Mapping[str, Any] = MappingProxyType(
            {}
        )  # inputs of a batch to generate, besides tokens and mask
        _thought_end: ThoughtEnd | None = None

        @property
        def thought_end(self) -> ThoughtEnd | None:
            return self._thought_end

        @thought_end.setter
        def thought_end(self, thought_end: ThoughtEnd | None) -> None:
            self._thought_end = thought_end
            self.think_end_token = thought_end and (thought_end.end if thought_end.token is None else thought_end.token)

        @property
        def max_scored_tokens(self) -> int:
            return int(self.max_length) + 1  # the last token is only predicted

        def _loglikelihood_tokens(
            self, requests: list[RequestTokens], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            limit = min(self.max_length, self._max_shareable) if self._shares_exactly else 0
            shared: list[int] = []
            alone: list[int] = []
            for number, (_, context, continuation) in enumerate(requests):
                (shared if len(context) + len(continuation) - 1 <= limit else alone).append(number)
            answers: dict[int, tuple[float, bool]] = {}
            if alone:
                results = super()._loglikelihood_tokens(
                    [requests[number] for number in alone], disable_tqdm, override_bs
                )
                answers.update(zip(alone, results, strict=True))
            bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
            bar.update(len(alone))
            shared_requests = [requests[number] for number in shared]
            for row in token_rows(
                [context + continuation[:-1] for _, context, continuation in shared_requests], self.row_tokens
            ):
                row_answers = self.answer_row(row, [shared_requests[number] for number in row.sequences])
                for number, answer in zip(row.sequences, row_answers, strict=True):
                    answers[shared[number]] = answer
                    if (texts := shared_requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update(1)
            bar.close()
            return [answers[number] for number in range(len(requests))]

        def answer_row(self, row: SharedRow, requests: Sequence[RequestTokens]) -> list[tuple[float, bool]]:
            """Return the log-probability of each continuation in one row, in nats, and whether it is the argmax."""
            import torch

            target_indices = [
                path[-len(continuation) :] for path, (_, _, continuation) in zip(row.paths, requests, strict=True)
            ]
            indices = np.unique(np.concatenate(target_indices))
            logits = self.row_logits(row, indices)
            # A few positions at a time stay in the processor's cache.
            summaries = [
                (part.logsumexp(1), part.amax(1)) for part in map(torch.Tensor.float, torch.split(logits, _LOGIT_ROWS))
            ]
            normalizers, largest = (torch.cat(parts) for parts in zip(*summaries, strict=True))
            results = []
            for at, (_, _, continuation) in zip(target_indices, requests, strict=True):
                rows = torch.from_numpy(np.searchsorted(indices, at)).to(logits.device)
                targets = torch.tensor(continuation, device=logits.device)
                target_logits = logits[rows, targets].float()
                # argmax, which takes the first of equal logits, is slow, so it runs only if all targets are largest.
                is_argmax = bool((target_logits == largest[rows]).all()) and bool(
                    (logits[rows].argmax(1) == targets).all()
                )
                results.append((float((target_logits - normalizers[rows]).sum()), is_argmax))
            return results

        def row_logits(self, row: SharedRow, indices: Any) -> torch.Tensor:
            """Return the logits that follow the tokens at ``indices`` of ``row``, ``[indices, vocabulary]``."""
            import torch

            logit_indices = torch.from_numpy(indices).to(self.device)
            with torch.inference_mode():
                out = self.model(**row_inputs(self.model, row), use_cache=False, logits_to_keep=logit_indices)
            return out.logits[0]  # type: ignore[no-any-return]  # transformers' outputs are untyped here

        def _model_generate(
            self,
            context: torch.Tensor,
            max_length: int,
            stop: list[str],
            attention_mask: torch.Tensor | None = None,
            **settings: Any,
        ) -> torch.Tensor:
            written = self._generate_batch(context, max_length, stop, attention_mask, **settings)
            begin = context.shape[1]
            self.answer_ends = self.end_answers(written[:, begin:], max_length - begin, stop, settings)
            return written

        def end_answers(
            self, answers: torch.Tensor, budget: int, stop: list[str], settings: Mapping[str, Any]
        ) -> deque[AnswerEnd]:
            """Return the ends of generated answers, ``[answers, tokens]``, that have up to ``budget`` tokens.

            If the model thinks, replace the tokens of ``answers`` after each end by padding, because they must not
            change where a thought ends.
            """
            tokens = {*self._eos, *np.atleast_1d(settings.get("eos_token_id") or []).tolist()}
            ends = deque(
                answer_end(row, tokens, stop, self._texts, budget, self.thought_end) for row in answers.tolist()
            )
            if self.thought_end is not None:
                for row, end in zip(answers, ends, strict=True):
                    row[end.tokens or 0 :] = self.tokenizer.pad_token_id
            return ends

        def _generate_batch(
            self,
            context: torch.Tensor,
            max_length: int,
            stop: list[str],
            attention_mask: torch.Tensor | None,
            **settings: Any,
        ) -> torch.Tensor:
            """Return the prompts of a batch with their answers, ``[prompts, length]``."""
            import torch

            write = super()._model_generate
            strings = [text for text in stop if text]
            if self.thought_end is not None and self.thought_end.is_expected:  # lm-eval would stop within a thought
                stop = [text for text in strings if text == self.tok_decode(self.eot_token_id, False)]
            is_supported = (
                not self.picture_inputs
                and not {name for name, value in settings.items() if value} - _SINGLE_SEQUENCE
                and self._writes_exactly
            )
            if not is_supported or attention_mask is None or max_length > min(self.max_length, self._max_shareable):
                arguments = {"max_length": max_length, "stop": stop, "attention_mask": attention_mask}
                return write(context, **arguments, **settings, **self.picture_inputs)  # type: ignore[no-any-return]
            cache = cache_prompts(self.model, context, attention_mask, self.row_tokens)

            def generate_to(ids: torch.Tensor, mask: torch.Tensor, end: int) -> torch.Tensor:
                arguments = {"max_length": end, "stop": stop, "attention_mask": mask, "past_key_values": cache}
                return write(ids, **arguments, **settings)  # type: ignore[no-any-return]

            if settings.get("do_sample"):  # random draws depend on the other sequences in the batch
                return generate_to(context, attention_mask, max_length)
            # lm-eval generates until every answer of the batch contains the same stop string or reaches the token
            # limit, and then truncates each answer at the first stop string. Removing an answer that contains any stop
            # string, between steps of a few tokens, therefore does not change it and saves all further tokens.
            prompts, begin = context.shape
            written = context.new_full((prompts, max_length), self.tokenizer.pad_token_id)
            unfinished, ids, end = torch.arange(prompts, device=context.device), context, begin
            mask = attention_mask
            while len(unfinished) and ids.shape[1] == end < max_length:
                end = min(end + _STEP, max_length)
                ids = generate_to(ids, mask, end)
                written[unfinished, : ids.shape[1]] = ids
                remaining = [
                    index
                    for index, row in enumerate(ids[:, begin:].tolist())
                    if self._eos.isdisjoint(row) and not self._has_stopped(row, strings)
                ]
                mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
                if len(remaining) < len(unfinished):
                    indices = torch.tensor(remaining, dtype=torch.long, device=context.device)
                    cache.batch_select_indices(indices)
                    unfinished, ids, mask = unfinished[indices], ids[indices], mask[indices]
            return written[:, : ids.shape[1]]

        def _has_stopped(self, ids: list[int], stop: Sequence[str]) -> bool:
            """Return whether an answer contains a stop string, after its thought if it has one."""
            thought_end = self.thought_end or ThoughtEnd("", is_expected=False)
            texts = thought_end.answer_texts(ids, lambda tokens: [self.tok_decode(tokens)])
            return any(string in text for text in texts for string in stop)

        @property
        def _eos(self) -> set[int]:
            """Tokens at which the network itself ends an answer."""
            return set(np.atleast_1d(self.model.generation_config.eos_token_id or []).tolist())

        def _texts(self, ids: list[int]) -> tuple[str, str]:
            """Return the text of an answer with special tokens (searched for stop strings) and without (scored)."""
            return self.tok_decode(ids, skip_special_tokens=False), self.tok_decode(ids)

        @property
        def row_tokens(self) -> int:
            return int(self.batch_size) * _TOKENS_PER_REQUEST

        @cached_property
        def _max_shareable(self) -> int:
            return max_shared_length(self.model.config.get_text_config().to_dict())

        @cached_property
        def _shares_exactly(self) -> bool:
            """Whether sequences in a row have the same logits as each sequence alone."""
            import torch

            if self.model.config.get_text_config().vocab_size <= 16:
                return False
            first, *further = ([*PROBE_TOKENS, *end] for end in ([13, 9, 15, 8], [10, 12, 11], [16, 5, 14]))
            in_rows = []
            try:
                for sequence in further:
                    (row,) = token_rows([first, sequence], 64)
                    path = row.paths[row.sequences.index(0)]
                    in_rows.append(self.row_logits(row, path[-4:]).float())
                with torch.inference_mode():
                    logits = self.model(torch.tensor([first], device=self.device), use_cache=False).logits[0]
            except _REFUSALS:
                return False  # the network does not support such a mask, positions, or a selection of logits
            with_second, with_third = in_rows
            alone = logits[-4:].float()
            return _are_close(with_second, alone, logits.dtype) and _are_close(with_second, with_third, logits.dtype)

        @cached_property
        def _writes_exactly(self) -> bool:
            """Whether the logits after prompts with a shared cache are the same as after whole prompts."""
            import torch

            if not self._shares_exactly:
                return False
            usual = self.model.generation_config
            if usual.get_generation_mode() not in ("greedy_search", "sample") or any(
                getattr(usual, name) for name in _COUNTED
            ):
                return False  # several sequences per prompt, another cache, or token counts that start at the prompt
            prompts = [[*PROBE_TOKENS * 4, *end] for end in ([13, 9, 15, 8], [10, 12, 11], [5])]
            longest = max(map(len, prompts))
            tokens, mask = (
                torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.device)
                for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
            )
            try:
                cache = cache_prompts(self.model, tokens, mask, 64)
                positions = mask.sum(1, keepdim=True) - 1
                with torch.no_grad():
                    arguments = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache}
                    written = self.model(tokens[:, -1:], **arguments, use_cache=True).logits[:, -1]
                    alone = [
                        self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1]
                        for ids in prompts
                    ]
            except _REFUSALS:
                return False  # the network keeps another kind of state
            return _are_close(written, torch.stack(alone), written.dtype)

    return SharedPrefixLM


def max_shared_length(config: Mapping[str, Any]) -> int:
    """Return the number of tokens up to which every layer attends to all previous tokens with unscaled positions."""
    text = text_part(config).config
    limits = [text.get("sliding_window"), text.get("attention_chunk_size")]
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    if any((kind.get("rope_type") or kind.get("type")) in _LENGTH_DEPENDENT for kind in kinds):
        own = text.get("original_max_position_embeddings") or next(
            (kind["original_max_position_embeddings"] for kind in kinds if "original_max_position_embeddings" in kind),
            text.get("max_position_embeddings"),
        )
        limits.append(own)
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=1 << 31)


def _are_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits are equal up to rounding errors of many layers; a wrong position changes them far more."""
    import torch

    if actual.shape != expected.shape:
        return False
    bound = math.sqrt(torch.finfo(dtype).eps) * float(expected.float().std())
    return bool((actual.float() - expected.float()).abs().max() <= bound)


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    with load_model(model, dtype=scoring.dtype, device=device) as loaded:
        lm = wrap_model(loaded, scoring)
        # Only prompts with pictures need the processor, whose packages may be missing.
        lm.open_processor = partial(load_processor, model.name, model.directory, runs_code=model.runs_code)
        yield lm


@cache
def _lm_type(*, is_causal: bool, reads_pictures: bool) -> type[Any]:
    base = shared_prefix_type()
    if not is_causal:
        return define_encoder_decoder(base)
    return define_picture_reader(base) if reads_pictures else base


def wrap_model(loaded_model: LoadedModel, scoring: BackendScoring) -> Any:
    is_causal = not loaded_model.network.config.is_encoder_decoder
    reads_pictures = is_causal and "pictures" in loaded_model.kind.task_forms
    return _lm_type(is_causal=is_causal, reads_pictures=reads_pictures)(
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
