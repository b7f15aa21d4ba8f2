"""Define lm-eval's models for transformers networks, which compute tokens that requests share only once.

lm-eval runs the model over the prompt and answer of every request, padded to the longest of the batch, and takes the
log-softmax at every position. ``SharedPrefixLM`` extends its ``HFLM``: it packs requests into rows
(:mod:`.shared_prefix`), and only positions whose next token is requested go through the output head. The results equal
those of separate sequences except for the last digits, which also depend on the batch size.

This works only for a network in which positions and the attention mask alone determine what a token attends to. Most
networks qualify. Networks that carry a state from token to token (Mamba, RWKV) or count positions themselves (BLOOM)
do not. Each network is therefore tested first: a sequence must have the same logits in a row as alone, whatever else
is in the row. lm-eval's own code scores sequences long enough for windowed attention or scaled rotary embeddings.

Importing this module takes long, so the module ``hf`` imports it when it opens a model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria

from mergegate.merge_core.architecture import text_part
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.backends.answer_ends import AnswerEnd, ThoughtEnd, answer_end
from mergegate.tasks.quality.evaluation.backends.picture_processor import encode_prompts
from mergegate.tasks.quality.evaluation.backends.pictures import PicturePrompt, split_at_placeholders
from mergegate.tasks.quality.evaluation.backends.shared_prefix import SharedRow, cache_prompts, row_inputs, token_rows

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


class SharedPrefixLM(HFLM):  # type: ignore[misc]  # lm-eval's base classes are untyped
    """An ``HFLM`` that computes tokens shared by several requests once, wherever this does not change results."""

    answer_ends: deque[AnswerEnd]  # ends of the last batch, see ``AnswerEnd``
    picture_inputs: Mapping[str, Any] = MappingProxyType({})  # inputs of a batch to generate, besides tokens and mask
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
            results = super()._loglikelihood_tokens([requests[number] for number in alone], disable_tqdm, override_bs)
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
            is_argmax = bool((target_logits == largest[rows]).all()) and bool((logits[rows].argmax(1) == targets).all())
            results.append((float((target_logits - normalizers[rows]).sum()), is_argmax))
        return results

    def row_logits(self, row: SharedRow, indices: Any) -> torch.Tensor:
        """Return the logits that follow the tokens at ``indices`` of ``row``, ``[indices, vocabulary]``."""
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
        ends = deque(answer_end(row, tokens, stop, self._texts, budget, self.thought_end) for row in answers.tolist())
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


class EncoderDecoderLM(SharedPrefixLM):
    """An ``HFLM`` for networks whose encoder reads the prompt and whose decoder writes the answer.

    The decoder also rates answer choices, as with lm-eval's ``backend="seq2seq"``. Three properties of lm-eval's code
    would make an answer depend on other requests in its batch, or on the length of its prompt:

    * It pads prompts on the left, which moves their positions in models with absolute ones (BART). Here, padding
      follows the prompt, and the attention mask hides it.
    * It adds the length of the longest prompt to the token budget of an answer, although the prompt takes no room in
      the decoder. Here, an answer has the budget of its task.
    * It lets the network derive the decoder's input from padded answers, and some networks (mBART) then begin with the
      last token. Here, the input begins with the token with which the network generates.

    Without padding and for answers within the budget, the scores are those of lm-eval. No prefix is shared.
    """

    answer_ends: deque[AnswerEnd]
    shared_context = None  # prompt and answer have separate limits

    @property
    def max_scored_tokens(self) -> int:
        return int(self.max_length)

    @property
    def _start(self) -> int:
        """Token with which the decoder begins."""
        configurations = (self.model.generation_config, self.model.config.get_text_config(decoder=True))
        names = ("decoder_start_token_id", "bos_token_id")
        tokens = [getattr(each, name, None) for name in names for each in configurations]
        return next(int(token) for token in (*tokens, self.prefix_token_id) if token is not None)

    @property
    def _longest_answer(self) -> int | None:
        """Number of tokens for which the decoder has positions, or None if it computes them."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return None if limit is None else int(limit) - 1

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        limit = min(self.max_length, self._longest_answer or self.max_length)
        if (longest := max((len(answer) for _, _, answer in requests), default=0)) > limit:
            raise InvalidInput(
                "an answer choice",
                found=f"{longest:,} tokens",
                expected=f"at most {limit:,}, as the model allows",
                remedy="increase evaluate.max_length if the model supports more, or use another task",
            )
        return HFLM._loglikelihood_tokens(self, requests, *args, **kwargs)  # type: ignore[no-any-return]

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert labels is not None
        begin = torch.full_like(labels[:, :1], self._start)
        with torch.inference_mode():
            output = self.model(
                input_ids=inps,
                attention_mask=attn_mask,
                decoder_input_ids=torch.cat([begin, labels[:, :-1]], 1),
                use_cache=False,
            )
        return output.logits  # type: ignore[no-any-return]  # transformers' outputs are untyped here

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        width = max(map(len, rows))
        ids = [row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return torch.tensor(ids), torch.tensor(mask)

    def generate_until(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[str]:
        if any("max_length" in request.args[1] for request in requests):
            raise InvalidInput(
                "generation_kwargs: max_length",
                found="a limit on prompt and answer together",
                expected="max_gen_toks, because an encoder-decoder reads the prompt apart from its answer",
            )
        return super().generate_until(requests, *args, **kwargs)  # type: ignore[no-any-return]

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: torch.Tensor | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        budget = max_length - context.shape[1]
        longest = min(budget, self._longest_answer or budget)
        # As in lm-eval: without settings, the likeliest tokens.
        temperature = settings.pop("temperature", 0.0)
        if temperature == 0.0 and settings.get("do_sample") is None:
            settings["do_sample"] = False
        if settings["do_sample"] is not False or temperature != 0.0:
            settings["temperature"] = temperature
        written: torch.Tensor = self.model.generate(
            input_ids=context,
            attention_mask=attention_mask,
            max_length=1 + longest,  # The decoder starts with one token.
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, 1, len(context)),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **settings,
        )
        is_forced = self.model.generation_config.forced_eos_token_id is not None
        ends = self.end_answers(written[:, 1:], longest, stop, settings)
        self.answer_ends = deque(self._end(end, budget, longest, is_forced) for end in ends)
        return written

    @staticmethod
    def _end(end: AnswerEnd, budget: int, longest: int, is_forced: bool) -> AnswerEnd:
        """Return the end of an answer. An end token that is forced at the limit counts as cut off."""
        is_cut_off = end.reason == "length" or (end.reason == "eos" and is_forced and end.tokens == longest)
        return end._replace(reason="length" if longest == budget else "context") if is_cut_off else end


class PictureReaderLM(SharedPrefixLM):
    """An ``LM`` that also reads ``PicturePrompt`` objects. Its creator sets ``open_processor``.

    lm-eval's ``hf-multimodal`` answers such requests, too, but it cuts long prompts in the middle of a picture, reports
    no ends of answers, and scores no answer choices. Here, requests pass through the code for prompts without pictures,
    and only the encoding of a prompt differs.
    """

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
        if picture_inputs is None:
            return super()._model_call(inps, *args, **kwargs)  # type: ignore[no-any-return]  # untyped
        with torch.inference_mode():
            return self.model(input_ids=inps, **picture_inputs).logits  # type: ignore[no-any-return]

    def _encode(self, prompts: Sequence[PicturePrompt]) -> Any:
        if self._processor is None:
            self._processor = self.open_processor()
        return encode_prompts(self._processor, prompts).to(self.device, self.model.dtype)


def _require_room(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise InvalidInput(
            "a prompt with pictures",
            found=f"{tokens:,} tokens, some of which stand for the pictures",
            expected=f"at most {limit:,}: a prompt with pictures is not cut",
            remedy="increase evaluate.max_length if the model supports more, or use smaller pictures",
        )


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
    if actual.shape != expected.shape:
        return False
    bound = math.sqrt(torch.finfo(dtype).eps) * float(expected.float().std())
    return bool((actual.float() - expected.float()).abs().max() <= bound)
