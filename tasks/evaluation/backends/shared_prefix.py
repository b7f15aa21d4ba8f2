"""lm-eval's ``HFLM`` that reads what requests have in common once.

Where lm-eval runs a model over question and answer for each answer anew, padded to the longest of a batch, and takes
the log-softmax of every position: here requests are laid into rows (:mod:`.token_rows`), and only the positions whose
next token is asked go through the head. The numbers are those of whole sequences but for the last places, which the
size of a batch moves as well.

That takes a network in which a token is seen by its position and by what may see it. Most attend to no more than that;
those that keep a state from token to token (Mamba, RWKV), or that count positions themselves (BLOOM), do not. So each
is tried before it is trusted: sequences in a row must have the logits that they have alone, whatever stands beside
them. What a window of attention or a scaled rotation would treat otherwise goes on its own as before, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.tasks.evaluation.backends.batch_schedule import write_in_stretches
from mergegate.tasks.evaluation.backends.common_prefix import read_apart
from mergegate.tasks.evaluation.backends.contract import AnswerEnd
from mergegate.tasks.evaluation.backends.token_rows import SharedRow, row_inputs, token_rows

if TYPE_CHECKING:
    import torch

# Tokens of a row, for each request that the profile has answered together: about what a short question takes.
_TOKENS_A_REQUEST = 24
# What a rotation that depends on the length of its batch is called.
_BY_LENGTH = ("dynamic", "longrope")
# Tokens that begin every sequence with which a network is tried.
TRIED_WITH = (5, 9, 6, 8, 7)
# Settings of generation that choose a token from one sequence's logits, and keep no sequences beside it.
_DRAWN = {"use_cache", "do_sample", "temperature", "top_k", "top_p", "min_p"}
# Settings that a model may bring along, and that mean something else where an answer is written in stretches.
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
# What a network raises at inputs that it does not take.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)

AskedTokens = tuple[tuple[str, str], list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


@cache
def shared_prefix_type() -> type[Any]:
    """The class; lm-eval is imported with it."""
    from lm_eval.models import huggingface

    class SharedPrefixLM(huggingface.HFLM):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """Answers ``loglikelihood`` by rows, and writes after a beginning that was read once, where its network allows
        it."""

        answer_ends: deque[AnswerEnd]  # of the last batch, see ``AnswerEnd``

        def _loglikelihood_tokens(
            self, requests: list[AskedTokens], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            together: list[int] = []
            alone: list[int] = []
            for number, request in enumerate(requests):
                (together if self._may_share(request) else alone).append(number)
            answers: dict[int, tuple[float, bool]] = {}
            if alone:
                found = super()._loglikelihood_tokens([requests[number] for number in alone], disable_tqdm, override_bs)
                answers.update(zip(alone, found, strict=True))
            bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
            bar.update(len(alone))
            chosen = [requests[number] for number in together]
            for row in token_rows(
                [context + continuation[:-1] for _, context, continuation in chosen], self.row_tokens
            ):
                of_row = self.answer_row(row, [chosen[number] for number in row.sequences])
                for number, answer in zip(row.sequences, of_row, strict=True):
                    answers[together[number]] = answer
                    if (asked := chosen[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", asked, answer)
                    bar.update(1)
            bar.close()
            return [answers[number] for number in range(len(requests))]

        def answer_row(self, row: SharedRow, requests: Sequence[AskedTokens]) -> list[tuple[float, bool]]:
            """One batch: log-probability in nats of each continuation, and whether it is what the model would say."""
            import torch

            wanted = [
                path[-len(continuation) :] for path, (_, _, continuation) in zip(row.paths, requests, strict=True)
            ]
            places = np.unique(np.concatenate(wanted))
            logits = self.row_logits(row, places)
            found = []
            for at, (_, _, continuation) in zip(wanted, requests, strict=True):
                of_it = logits[torch.from_numpy(np.searchsorted(places, at)).to(logits.device)].float()
                said = torch.tensor(continuation, device=logits.device)
                likely = of_it.gather(1, said[:, None])[:, 0] - of_it.logsumexp(1)
                found.append((float(likely.sum()), bool((of_it.argmax(1) == said).all())))
            return found

        def row_logits(self, row: SharedRow, places: Any) -> torch.Tensor:
            """Logits after the tokens at ``places``, ``[places, vocabulary]``."""
            import torch

            kept = torch.from_numpy(places).to(self.device)
            with torch.inference_mode():
                out = self.model(**row_inputs(self.model, row), use_cache=False, logits_to_keep=kept)
            return out.logits[0]  # type: ignore[no-any-return]  # transformers' outputs are untyped here

        def _model_generate(
            self,
            context: torch.Tensor,
            max_length: int,
            stop: list[str],
            attention_mask: torch.Tensor | None = None,
            **how: Any,
        ) -> torch.Tensor:
            written = self._written(context, max_length, stop, attention_mask, **how)
            begin = context.shape[1]
            ends = {*self._eos, *np.atleast_1d(how.get("eos_token_id") or []).tolist()}
            self.answer_ends = deque(
                answer_end(row, ends, stop, self._texts, max_length - begin) for row in written[:, begin:].tolist()
            )
            return written

        def _written(
            self,
            context: torch.Tensor,
            max_length: int,
            stop: list[str],
            attention_mask: torch.Tensor | None,
            **how: Any,
        ) -> torch.Tensor:
            """Return the prompts of a batch with their answers, ``[prompts, length]``."""
            write = super()._model_generate
            apart = not {name for name, value in how.items() if value} - _DRAWN and self._writes
            if not apart or attention_mask is None or max_length > min(self.max_length, self._longest):
                told = {"max_length": max_length, "stop": stop, "attention_mask": attention_mask}
                return write(context, **told, **how)  # type: ignore[no-any-return]
            kept = read_apart(self.model, context, attention_mask, self.row_tokens)

            def go_on(ids: torch.Tensor, mask: torch.Tensor, end: int) -> torch.Tensor:
                told = {"max_length": end, "stop": stop, "attention_mask": mask, "past_key_values": kept}
                return write(ids, **told, **how)  # type: ignore[no-any-return]

            if how.get("do_sample"):  # What one sequence is given by chance depends on who is there.
                return go_on(context, attention_mask, max_length)
            ends = self._eos

            def is_done(ids: list[int]) -> bool:
                return not ends.isdisjoint(ids) or any(end in self.tok_decode(ids) for end in stop if end)

            padding = self.tokenizer.pad_token_id
            return write_in_stretches(go_on, is_done, kept, context, attention_mask, max_length, padding)

        @property
        def _eos(self) -> set[int]:
            """Tokens at which the network itself ends an answer."""
            return set(np.atleast_1d(self.model.generation_config.eos_token_id or []).tolist())

        def _texts(self, ids: list[int]) -> tuple[str, str]:
            """Text of an answer as generation compares it with stop strings, and as it is scored."""
            return self.tok_decode(ids, skip_special_tokens=False), self.tok_decode(ids)

        @property
        def row_tokens(self) -> int:
            return int(self.batch_size) * _TOKENS_A_REQUEST

        def _may_share(self, request: AskedTokens) -> bool:
            _, context, continuation = request
            length = len(context) + len(continuation) - 1
            return length <= min(self.max_length, self._longest) and self._shares

        @cached_property
        def _longest(self) -> int:
            return longest_alike(self.model.config.to_dict())

        @cached_property
        def _shares(self) -> bool:
            return shares_exactly(self)

        @cached_property
        def _writes(self) -> bool:
            return self._shares and writes_exactly(self)

    return SharedPrefixLM


def answer_end(
    ids: Sequence[int],
    eos: Collection[int],
    stop: Sequence[str],
    texts: Callable[[list[int]], Sequence[str]],
    budget: int,
) -> AnswerEnd:
    """Return how one answer of a batch ended.

    Args:
        ids: Tokens generated after the prompt. What follows the end of the answer is ignored: padding, or tokens that
            were generated because other answers of the batch were not done.
        eos: Tokens that end an answer.
        stop: Texts that end an answer.
        texts: Decodes tokens, in each way in which ``stop`` is looked for.
        budget: Largest number of tokens of an answer.
    """
    last = next((count for count, token in enumerate(ids, 1) if token in eos), None)
    before = list(ids if last is None else ids[: last - 1])

    def has_stopped(count: int) -> bool:
        return any(one in text for text in texts(before[:count]) for one in stop if one)

    if has_stopped(len(before)):
        return AnswerEnd("stop", bisect_left(range(len(before)), True, key=has_stopped))
    if last is not None:
        return AnswerEnd("eos", last)
    # A batch that ends before its budget has no open answer: transformers has criteria of its own, such as max_time.
    return AnswerEnd("length" if len(ids) >= budget else "stop", len(ids))


def longest_alike(config: Mapping[str, Any]) -> int:
    """Tokens up to which every layer of a network sees all that came before, and turns by its position alone."""
    text = config.get("text_config") or config
    limits = [text.get("sliding_window"), text.get("attention_chunk_size")]
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    if any((kind.get("rope_type") or kind.get("type")) in _BY_LENGTH for kind in kinds):
        own = text.get("original_max_position_embeddings") or next(
            (kind["original_max_position_embeddings"] for kind in kinds if "original_max_position_embeddings" in kind),
            text.get("max_position_embeddings"),
        )
        limits.append(own)
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=1 << 31)


def shares_exactly(lm: Any) -> bool:
    """Whether sequences in one row have the logits that each has alone, whatever stands beside them."""
    import torch

    if lm.model.config.get_text_config().vocab_size <= 16:
        return False
    one, *others = ([*TRIED_WITH, *end] for end in ([13, 9, 15, 8], [10, 12, 11], [16, 5, 14]))
    seen = []
    try:
        for other in others:
            (row,) = token_rows([one, other], 64)
            path = row.paths[row.sequences.index(0)]
            seen.append(lm.row_logits(row, path[-4:]).float())
        with torch.inference_mode():
            whole = lm.model(torch.tensor([one], device=lm.device), use_cache=False).logits[0]
    except _REFUSALS:
        return False  # It takes no such mask, no positions, no choice of logits.
    together, again = seen
    alone = whole[-4:].float()
    return _alike(together, alone, whole.dtype) and _alike(together, again, whole.dtype)


def writes_exactly(lm: Any) -> bool:
    """Whether what is written after prompts that were read apart is what is written after whole ones."""
    import torch

    usual = lm.model.generation_config
    if usual.get_generation_mode() not in ("greedy_search", "sample") or any(getattr(usual, name) for name in _COUNTED):
        return False  # Several sequences for each prompt, another cache, or tokens that are counted from the prompt.
    prompts = [[*TRIED_WITH * 4, *end] for end in ([13, 9, 15, 8], [10, 12, 11], [5])]
    longest = max(map(len, prompts))
    tokens, mask = (
        torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=lm.device)
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    try:
        kept = read_apart(lm.model, tokens, mask, 64)
        positions = mask.sum(1, keepdim=True) - 1
        with torch.no_grad():
            told = {"position_ids": positions, "attention_mask": mask, "past_key_values": kept}
            written = lm.model(tokens[:, -1:], **told, use_cache=True).logits[:, -1]
            alone = [lm.model(torch.tensor([ids], device=lm.device), use_cache=False).logits[0, -1] for ids in prompts]
    except _REFUSALS:
        return False  # It keeps something else of what it has read.
    return _alike(written, torch.stack(alone), written.dtype)


def _alike(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits are equal but for what the order of sums moves the last places by, through many layers; another
    position moves far more."""
    import torch

    if one.shape != other.shape:
        return False
    bound = math.sqrt(torch.finfo(dtype).eps) * float(other.float().std())
    return bool((one.float() - other.float()).abs().max() <= bound)
