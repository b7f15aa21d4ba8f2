"""What answers lm-eval's requests: transformers in this process, vLLM in this process, or a server over HTTP.

All three read a prompt alike: a tokenizer that adds a begin of text adds one, and none where the prompt (a chat
template's) begins with it; log-probabilities are sums of float32 log-softmax. vLLM's and most servers' are by nature;
transformers' are in the model's own dtype unless told otherwise, which rounds a bf16 model's by up to half a nat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from merge_core.errors import InvalidInput
from tasks.checkpoints import Model, load_model
from tasks.evaluation.scoring import ModelEndpoint, Scoring, VllmSettings


@contextmanager
def open_backend(model: Model, scoring: Scoring, device: str) -> Iterator[Any]:
    """lm-eval's interface to ``model``, ready to be asked; it has its tokenizer under ``tokenizer``.

    Args:
        device: ``cpu`` or ``cuda``, for transformers; the others find their own.

    Raises:
        InvalidInput: when the model cannot be loaded, vLLM is not installed, or the server does not answer as it must.
    """
    if scoring.backend == "vllm":
        yield _vllm(model, scoring)
    elif scoring.backend == "served":
        client = _served(model, scoring)
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
    else:
        with load_model(model, dtype=scoring.dtype, device=device) as loaded:
            from lm_eval.models.huggingface import HFLM

            yield HFLM(
                pretrained=loaded.network,
                tokenizer=loaded.tokenizer,
                backend="causal",
                softmax_dtype="float32",
                batch_size=scoring.batch_size,
                max_length=scoring.max_length,
            )


_engine: tuple[tuple[str, Scoring], Any] | None = None


def _vllm(model: Model, scoring: Scoring) -> Any:
    """lm-eval's vLLM; the engine stays for the next part, and dies with its process."""
    global _engine
    if _engine is not None and _engine[0] == (model.digest, scoring):
        return _engine[1]
    try:
        from lm_eval.models.vllm_causallms import VLLM
    except ImportError as error:
        raise InvalidInput(
            "evaluate.backend: vllm",
            found=f"vLLM cannot be imported here: {error}",
            expected="mergegate and vllm in one environment",
            remedy="install vllm there, or serve the models and use backend: served",
        ) from error
    settings = scoring.vllm or VllmSettings()
    try:
        lm = VLLM(
            pretrained=str(model.directory),
            dtype=scoring.dtype,
            max_length=scoring.max_length,
            batch_size=scoring.batch_size,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            trust_remote_code=False,
        )
    except Exception as error:
        # An engine that does not start says so with whatever its many layers raise.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found=f"vLLM cannot load it: {cause[:300]}",
            remedy="a smaller max_length or evaluate.vllm.gpu_memory_utilization, or more GPUs: tensor_parallel_size",
        ) from error
    _engine = ((model.digest, scoring), lm)
    return lm


def _served(model: Model, scoring: Scoring) -> Any:
    """lm-eval's client of completions servers, with tokens in place of text, after a question that shows what the
    server says about a prompt."""
    import transformers

    if scoring.server is None:
        raise InvalidInput("evaluate.server", found="nothing", expected="url, and names where they differ")
    where = scoring.server.at(model.name)
    url = where.url.rstrip("/").removesuffix("/completions") + "/completions"
    configuration: Any = transformers.AutoConfig.from_pretrained(model.directory, local_files_only=True)
    context = getattr(configuration.get_text_config(), "max_position_embeddings", None)
    client = _client()(
        model=where.model,
        base_url=url,
        tokenizer=str(model.directory),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        add_bos_token=None,
        num_concurrent=max(2, scoring.server.concurrency),  # with one, lm-eval goes another way, which cannot be asked
        batch_size=scoring.batch_size,
        max_length=scoring.max_length or context or 2048,
    )
    _see_that_prompts_are_scored(client, model, where, url)
    return client


def _client() -> type[Any]:
    try:
        import aiohttp  # noqa: F401  # lm-eval goes on without them, and fails much later
        import tenacity  # noqa: F401
        from lm_eval.models.openai_completions import LocalCompletionsAPI
    except ImportError as error:
        raise InvalidInput(
            "evaluate.backend: served",
            found=f"a library is missing: {error.name}",
            remedy="pip install 'mergegate[served]'",
        ) from error

    class Client(LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval's base classes are untyped
        """Cuts text into tokens exactly as the transformers backend does."""

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
