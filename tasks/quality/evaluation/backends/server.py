"""Run the backend ``served``: an existing server with OpenAI's completions API, over HTTP."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.tasks.base.http import JsonClient, Unreachable
from mergegate.tasks.quality.evaluation.backends.answer_ends import (
    CUT_OFF,
    AnswerEnd,
    AnswerReason,
    ThoughtEnd,
    require_visible,
)
from mergegate.tasks.quality.evaluation.backends.contract import Backend, BackendScoring

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import Model


class ModelEndpoint(BaseModel):
    """Address of one served model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="Address, such as http://host:8000/v1.")
    model: str = Field(description="Name of the model on the server.")


class ServerSettings(BaseModel):
    """The servers that answer for the models, in a profile under ``evaluate.server``.

    A server must support OpenAI's completions API and return log-probabilities of the prompt. mergegate cannot see
    which checkpoint is served. The author of the profile is responsible that it is the one of this run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(
        default=None, pattern=r"^https?://", description="Address of every model without an address of its own."
    )
    models: Mapping[str, str | ModelEndpoint] = Field(
        default_factory=dict,
        description="Name on the server, or {url, model}, by name of the model in this run (such as 'merge').",
    )
    concurrency: int = Field(default=8, ge=1, description="Number of concurrent requests. Default: 8.")

    def at(self, name: str) -> ModelEndpoint:
        """Return the address of a model in this run. Its name on the server defaults to its name in the run."""
        entry = self.models.get(name, name)
        if isinstance(entry, ModelEndpoint):
            return entry
        if self.url is None:
            raise InvalidInput(
                "evaluate.server",
                found=f"no address for {name!r}",
                expected="url for all models, or one for each under 'models'",
                remedy=f"models: {{{name}: {{url: 'http://host:8000/v1', model: {entry}}}}}",
            )
        return ModelEndpoint(url=self.url, model=entry)


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    """Yield lm-eval's client for completions servers, configured to send tokens, after a test request."""
    import transformers

    server = scoring.own_settings
    if not isinstance(server, ServerSettings):
        raise InvalidInput(
            "evaluate.server", found="no settings", expected="url, and the names of models if they differ"
        )
    endpoint = server.at(model.name)
    url = endpoint.url.rstrip("/").removesuffix("/completions") + "/completions"
    configuration: Any = transformers.AutoConfig.from_pretrained(
        model.directory, local_files_only=True, trust_remote_code=model.runs_code
    )
    context = getattr(configuration.get_text_config(), "max_position_embeddings", None)
    try:
        import aiohttp  # without it, lm-eval fails much later
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.openai_completions import LocalCompletionsAPI
        from lm_eval.models.utils import postprocess_generated_text
    except ImportError as error:
        raise InvalidInput(
            "evaluate.backend: served",
            found=f"a missing library: {error.name}",
            remedy=pip_command("mergegate[served]"),
        ) from error

    class Client(LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """Client that tokenizes exactly as the transformers backend does, and records how answers ended."""

        chat_template_args: Mapping[str, Any] = MappingProxyType({})
        _thought_end: ThoughtEnd | None = None
        _stop: Sequence[str] = ()  # stop strings of the current requests; concurrent requests have the same settings

        @property
        def thought_end(self) -> ThoughtEnd | None:
            return self._thought_end

        @thought_end.setter
        def thought_end(self, thought_end: ThoughtEnd | None) -> None:
            require_visible(thought_end, self.tokenizer, model.name)
            self._thought_end = thought_end

        @property
        def max_scored_tokens(self) -> int:
            return int(self.max_length)

        apply_chat_template = HFLM.apply_chat_template

        def _create_payload(self, messages: Any, generate: bool = False, **more: Any) -> Any:
            payload = super()._create_payload(messages, generate, **more)
            if generate:
                self._stop = payload["stop"]
                if (
                    self.thought_end is not None and self.thought_end.is_expected
                ):  # the server would stop within a thought
                    payload["stop"] = []
            return payload

        def parse_generations(self, outputs: Any, **more: Any) -> list[str | None]:
            texts: list[str | None] = LocalCompletionsAPI.parse_generations(outputs, **more)
            ends = [end for output in (outputs if isinstance(outputs, list) else [outputs]) for end in _ends_in(output)]
            finished = [self._finish(text, end) for text, end in zip(texts, ends, strict=True)]
            self.answer_ends = deque(end for _, end in finished)
            return [text for text, _ in finished]

        def _finish(self, text: str | None, end: AnswerEnd) -> tuple[str | None, AnswerEnd]:
            """Return an answer without its thought, and its end with the number of tokens."""
            if text is None:
                return None, end

            def count(part: str) -> int:
                return len(self.tokenizer.encode(part, add_special_tokens=False))

            if self.thought_end is None:
                tokens = count(text) + (end.reason not in CUT_OFF) if end.tokens is None else end.tokens
                return text, end._replace(tokens=tokens)
            if (kept := self.thought_end.without_tail(text, self._stop)) != text:
                end = AnswerEnd("stop", count(kept) + 1)
            elif end.tokens is None:
                end = end._replace(tokens=count(kept) + (end.reason not in CUT_OFF))
            before, found, _ = kept.rpartition(self.thought_end.end)
            is_unfinished = not found and self.thought_end.is_expected and end.reason in CUT_OFF
            thinking = end.tokens if is_unfinished else min(count(before + found), end.tokens or 0)
            answer = postprocess_generated_text(kept, list(self._stop), self.thought_end.end)
            return answer, end._replace(thinking=thinking)

        def tok_encode(
            self, string: Any, left_truncate_len: int | None = None, add_special_tokens: bool | None = None, **_: Any
        ) -> Any:
            if not isinstance(string, str):
                return [self.tok_encode(text, left_truncate_len, add_special_tokens) for text in string]
            begin = self.tokenizer.decode(self.prefix_token_id) if self.prefix_token_id is not None else None
            if add_special_tokens is None:
                add_special_tokens = not (begin and string.startswith(begin))
            tokens = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
            return tokens[-left_truncate_len:] if left_truncate_len else tokens

    client = Client(
        model=endpoint.model,
        base_url=url,
        tokenizer=str(model.directory),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        add_bos_token=None,
        num_concurrent=max(2, server.concurrency),  # with 1, lm-eval takes a code path that mergegate does not support
        batch_size=scoring.batch_size,
        max_length=scoring.max_length or context or 2048,
    )
    _require_prompt_scores(client, model, endpoint, url)
    try:
        yield client
    except (aiohttp.ClientError, TimeoutError) as error:  # after three attempts
        raise InvalidInput(
            f"evaluate.server: {client.base_url} for {model.name}",
            found=f"the server stopped answering: {type(error).__name__}: {error}",
            expected="a server that keeps answering",
            remedy="check the server and run again; finished scores are stored",
        ) from error


def _ends_in(answer: Any) -> list[AnswerEnd]:
    """Return how the answers in a server's response ended, in the order of the prompts."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    usage = answer.get("usage")
    # The token count is the sum over all choices, so it is the length of an answer only if there is one.
    token_count = usage.get("completion_tokens") if isinstance(usage, Mapping) and len(choices) == 1 else None
    ends = []
    for choice in choices:
        reason = choice.get("finish_reason")
        if reason == "stop" and "stop_reason" in choice and not isinstance(choice["stop_reason"], str):
            reason = "eos"  # vLLM's server reports None or a token id
        reasons: Mapping[object, AnswerReason] = {"stop": "stop", "eos": "eos", "length": "length"}
        ends.append(AnswerEnd(reasons.get(reason, ""), token_count if type(token_count) is int else None))
    return ends


def _require_prompt_scores(client: Any, model: Model, endpoint: ModelEndpoint, url: str) -> None:
    """Check that the server returns log-probabilities of a prompt.

    A server without this feature returns meaningless numbers. Every model would then score at chance level, and every
    merge would seem as good as its parents.
    """
    prompt: list[int] = client.tok_encode("The quick brown fox jumps over the lazy dog.")
    location = f"evaluate.server: {url} for {model.name}"
    try:
        with JsonClient(url, client.timeout, client.api_key) as server:
            answer = server.request("", client._create_payload([prompt], generate=False))
    except Unreachable as error:
        raise InvalidInput(
            location,
            found=f"the server cannot be reached: {error}",
            expected="a running server",
            remedy="start it, or correct evaluate.server.url",
        ) from None
    if not answer.ok:
        raise InvalidInput(
            location,
            found=f"status {answer.status}: {answer.message}",
            expected=f"completions of the model {endpoint.model!r}",
            remedy=f"set its name on the server in evaluate.server.models: {{{model.name}: …}}",
        )
    problem = ""
    try:
        logprobs = answer.body["choices"][0]["logprobs"]
        values: Sequence[float | None] = logprobs["token_logprobs"]
        tops = logprobs["top_logprobs"]
    except (KeyError, IndexError, TypeError):
        problem = "a response without log-probabilities"
    else:
        if len(values) != len(prompt) + 1 or tops is None or len(tops) != len(values):
            problem = f"log-probabilities of {len(values)} tokens for a prompt of {len(prompt)} and one more"
        elif any(value is None or not math.isfinite(value) or value > 0 for value in values[1:-1]):
            problem = "log-probabilities that are not numbers of at most 0"
        elif not any(values[1:-1]):
            problem = "log-probabilities that are all 0"
    if problem:
        raise InvalidInput(
            location,
            found=problem,
            expected="the log-probability of every token of the prompt (echo with logprobs)",
            remedy="use a server that supports this (vLLM), or backend: hf",
        )


BACKEND = Backend(
    "served",
    "a server that is running already",
    _opened,
    settings="server",
    needs_settings=True,
    draws_progress=("lm_eval.models.api_models",),
    network=True,
    environment=("OPENAI_API_KEY",),  # sent by lm-eval's client if set
)
