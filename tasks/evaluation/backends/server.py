"""``served``: a server that is running already and speaks OpenAI's completions, asked over HTTP."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.backends.contract import AnswerEnd, AnswerReason, Backend, BackendScoring

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import Model


class ModelEndpoint(BaseModel):
    """Where one model is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str  # 'http://host:8000/v1'
    model: str  # what the server calls it


class ServerSettings(BaseModel):
    """Which server answers for which model, in a profile under ``evaluate.server``.

    Any server that speaks OpenAI's completions and returns log-probabilities of the prompt. What it serves cannot be
    seen from here: that it is the checkpoint of this run is the word of whoever wrote the profile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(default=None, pattern=r"^https?://", description="Of every model that has none of its own.")
    models: Mapping[str, str | ModelEndpoint] = Field(
        default_factory=dict, description="By name in this run ('merge'): what the server calls it, or {url, model}."
    )
    concurrency: int = Field(default=8, ge=1, description="Requests under way at once.")

    def at(self, name: str) -> ModelEndpoint:
        """Where the model of this run that is called ``name`` is served; by that name where nothing else is said.

        Raises:
            InvalidInput: when no address is known for it.
        """
        found = self.models.get(name, name)
        if isinstance(found, ModelEndpoint):
            return found
        if self.url is None:
            raise InvalidInput(
                "evaluate.server",
                found=f"no address for {name!r}",
                expected="url for all models, or one for each under 'models'",
                remedy=f"models: {{{name}: {{url: 'http://host:8000/v1', model: {found}}}}}",
            )
        return ModelEndpoint(url=self.url, model=found)


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    client = _client_of(model, scoring)
    import aiohttp

    try:
        yield client
    except (aiohttp.ClientError, TimeoutError) as error:  # after three tries
        raise InvalidInput(
            f"evaluate.server: {client.base_url} for {model.name}",
            found=f"no answer any more: {type(error).__name__}: {error}",
            expected="a server that goes on answering",
            remedy="look at the server; what is scored already is not asked again",
        ) from error


def _client_of(model: Model, scoring: BackendScoring) -> Any:
    """lm-eval's client of completions servers, with tokens in place of text, after a question that shows what the
    server says about a prompt."""
    import transformers

    server = scoring.own_settings
    if not isinstance(server, ServerSettings):
        raise InvalidInput("evaluate.server", found="nothing", expected="url, and names where they differ")
    where = server.at(model.name)
    url = where.url.rstrip("/").removesuffix("/completions") + "/completions"
    configuration: Any = transformers.AutoConfig.from_pretrained(
        model.directory, local_files_only=True, trust_remote_code=model.runs_code
    )
    context = getattr(configuration.get_text_config(), "max_position_embeddings", None)
    client = _client_type()(
        model=where.model,
        base_url=url,
        tokenizer=str(model.directory),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        add_bos_token=None,
        num_concurrent=max(2, server.concurrency),  # with one, lm-eval goes another way, which cannot be asked
        batch_size=scoring.batch_size,
        max_length=scoring.max_length or context or 2048,
    )
    _see_that_prompts_are_scored(client, model, where, url)
    return client


def _client_type() -> type[Any]:
    try:
        import aiohttp  # noqa: F401  # lm-eval goes on without it, and fails much later
        from lm_eval.models.openai_completions import LocalCompletionsAPI
    except ImportError as error:
        raise InvalidInput(
            "evaluate.backend: served",
            found=f"a library is missing: {error.name}",
            remedy="pip install 'mergegate[served]'",
        ) from error

    class Client(LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """Cuts text into tokens exactly as the transformers backend does, and records how answers ended."""

        def parse_generations(self, outputs: Any, **more: Any) -> list[str]:
            texts: list[str] = LocalCompletionsAPI.parse_generations(outputs, **more)
            self.answer_ends = deque(
                end for one in (outputs if isinstance(outputs, list) else [outputs]) for end in _ends_in(one)
            )
            return texts

        def tok_encode(
            self,
            string: Any,
            left_truncate_len: int | None = None,
            add_special_tokens: bool | None = None,
            **_: Any,
        ) -> Any:
            if not isinstance(string, str):
                return [self.tok_encode(one, left_truncate_len, add_special_tokens) for one in string]
            begin = self.tokenizer.decode(self.prefix_token_id) if self.prefix_token_id is not None else None
            if add_special_tokens is None:
                add_special_tokens = not (begin and string.startswith(begin))
            tokens = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
            return tokens[-left_truncate_len:] if left_truncate_len else tokens

    return Client


def _ends_in(answer: Any) -> list[AnswerEnd]:
    """Return how the answers in a server's response ended, in the order of their prompts."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    usage = answer.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) and len(choices) == 1 else None  # of all
    ends = []
    for choice in choices:
        reason = choice.get("finish_reason")
        if reason == "stop" and "stop_reason" in choice and not isinstance(choice["stop_reason"], str):
            reason = "eos"  # vLLM's server: None or the number of a token
        known: Mapping[object, AnswerReason] = {"stop": "stop", "eos": "eos", "length": "length"}
        ends.append(AnswerEnd(known.get(reason, ""), counted if type(counted) is int else None))
    return ends


def _see_that_prompts_are_scored(client: Any, model: Model, where: ModelEndpoint, url: str) -> None:
    """Ask for one prompt what every question relies on. Servers that cannot do it answer all the same, with numbers
    that mean nothing: every model is then as good as chance, and every merge as good as its parents."""
    import requests

    prompt: list[int] = client.tok_encode("The quick brown fox jumps over the lazy dog.")
    place = f"evaluate.server: {url} for {model.name}"
    try:
        answer = requests.post(
            url, json=client._create_payload([prompt], generate=False), headers=client.header, timeout=client.timeout
        )
    except requests.RequestException as error:
        raise InvalidInput(
            place,
            found=f"cannot be reached: {type(error).__name__}",
            expected="a server that is running",
            remedy="start it, or correct evaluate.server.url",
        ) from None
    if not answer.ok:
        said = " ".join(answer.text.split())[:200]
        raise InvalidInput(
            place,
            found=f"answers {answer.status_code}: {said}",
            expected=f"completions of a model it calls {where.model!r}",
            remedy=f"name it in evaluate.server.models: {{{model.name}: …}}",
        )
    complaint = _fault_of(answer, len(prompt))
    if complaint:
        raise InvalidInput(
            place,
            found=complaint,
            expected="the log-probability of every token of the prompt (echo with logprobs)",
            remedy="a server that has it (vLLM), or backend: hf",
        )


def _fault_of(answer: Any, tokens: int) -> str:
    """What is wrong with an answer to a prompt of so many tokens; empty when nothing is."""
    try:
        said = answer.json()["choices"][0]["logprobs"]
        found: Sequence[float | None] = said["token_logprobs"]
        tops = said["top_logprobs"]
    except (ValueError, KeyError, IndexError, TypeError):
        return "an answer without log-probabilities"
    if len(found) != tokens + 1 or tops is None or len(tops) != len(found):
        return f"log-probabilities of {len(found)} tokens for a prompt of {tokens} and one more"
    scored = found[1:-1]
    if any(value is None or not math.isfinite(value) or value > 0 for value in scored):
        return "log-probabilities that are none"
    if not any(scored):
        return "log-probabilities that are all 0"
    return ""


BACKEND = Backend(
    "served",
    "a server that is running already",
    _opened,
    settings="server",
    needs_settings=True,
    draws_progress=("lm_eval.models.api_models",),
    network=True,
    environment=("OPENAI_API_KEY",),  # lm-eval's client sends it, where there is one
)
