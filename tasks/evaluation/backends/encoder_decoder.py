"""Answer lm-eval's requests with a network whose encoder reads the prompt and whose decoder writes the answer.

The decoder also rates answer choices, as with lm-eval's ``backend="seq2seq"``. Three properties of lm-eval's code would
make an answer depend on other requests in its batch, or on the length of its prompt:

* It pads prompts on the left, which moves their positions in models with absolute ones (BART). Here, padding follows
  the prompt, and the attention mask hides it.
* It adds the length of the longest prompt to the token budget of an answer, although the prompt takes no room in the
  decoder. Here, an answer has the budget of its task.
* It lets the network derive the decoder's input from padded answers, and some networks (mBART) then begin with the
  last token. Here, the input begins with the token with which the network generates.

Without padding and for answers within the budget, the scores are those of lm-eval.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.backends.answer_ends import AnswerEnd

if TYPE_CHECKING:
    import torch


def define_encoder_decoder(base: Any) -> type[Any]:
    """Define the class ``EncoderDecoderLM``, a subclass of ``SharedPrefixLM`` (``base``) that shares no prefix."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import stop_sequences_criteria

    class EncoderDecoderLM(base):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """An ``HFLM`` for encoder-decoders whose answers do not depend on other requests."""

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
            import torch

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
            import torch

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

    return EncoderDecoderLM
