"""Run the smoke test: static checks, reference, server, questions and verdict."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import Model, PinnedCheckpoint, call_model_process
from mergegate.tasks.http import Unreachable
from mergegate.tasks.serve import checks
from mergegate.tasks.serve.checks import ServedSubject, ServerQuestion
from mergegate.tasks.serve.client import Client, models_of
from mergegate.tasks.serve.launch import ServerKind, compile_server, context_of, dtype_of, launch
from mergegate.tasks.serve.lora import ServedAdapter, as_lora, base_name
from mergegate.tasks.serve.measurements import ServingCost, machine_name, today
from mergegate.tasks.serve.process import ServerEnded, ServerProcess
from mergegate.tasks.serve.reference import Reference, make_reference
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.speed import Speed, measure_speed
from mergegate.tasks.serve.static_checks import static_checks
from mergegate.tasks.serve.verdict import Check, MachineFailed, ServeVerdict, WronglyConfigured, serve_verdict

LOG = "server.log"
_KNOWS_NO_LORA = re.compile(r"(\w+) does not support LoRA")  # vLLM's message about an architecture
_QUESTIONS: tuple[tuple[str, ServerQuestion], ...] = (
    ("text", checks.ask_generation),
    ("parity", checks.ask_parity),
    ("the adapter's part", checks.ask_adapter),
    ("tokenizer", checks.ask_tokenizer),
    ("chat", checks.ask_chat),
    ("end of sequence", checks.ask_end),
    ("over-long prompt", checks.ask_too_long),
)
STEPS = len(_QUESTIONS) + 4  # static, reference, ready, throughput

OnStep = Callable[[int, str], None]  # receives the number of finished steps out of ``STEPS``, and the current step


def smoke_checkpoint(
    model: Model,
    settings: ServeSettings,
    kind: ServerKind,
    *,
    device: str,
    log: Path,
    adapted: PinnedCheckpoint | None = None,
    on_progress: OnStep = lambda done, doing: None,
) -> ServeVerdict:
    """Serve ``model`` and check its answers.

    Args:
        adapted: Base and adapter, if ``model`` is the two of them merged. vLLM then serves the adapter as LoRA, if it
            can. The reference is always computed from ``model``.
        kind: Server to start, from ``find_server``.
        device: Device on which transformers computes the reference.
        log: File for the output of the server.

    Raises:
        InvalidInput: The checkpoint cannot be read.
        MachineFailed: The server cannot run on this machine, which says nothing about the model.
    """
    on_progress(0, "static checks")
    checkpoint = open_checkpoint(model.directory)
    if model.runs_code:
        settings = settings.model_copy(update={"arguments": (*settings.arguments, "--trust-remote-code")})
    lora = as_lora(adapted, kind, settings) if adapted else None
    results, way = _static(checkpoint, lora, settings, model.runs_code)
    if any(check.outcome == "fail" for check in results):
        return serve_verdict(model.name, kind.label, results, way=way)  # refuse it without starting a server
    longest = context_of(settings, checkpoint)
    on_progress(1, "what transformers says")
    reference = _reference(model, checkpoint, settings, device, longest)
    try:
        adapter = lora if isinstance(lora, ServedAdapter) else None
        answers, measured = _serve(checkpoint, adapter, reference, longest, settings, kind, log, on_progress)
    except _NoLora as error:
        results, way = _static(checkpoint, f"vLLM has no LoRA for {error}", settings, model.runs_code)
        if any(check.outcome == "fail" for check in results):
            return serve_verdict(model.name, kind.label, results, way=way)
        answers, measured = _serve(checkpoint, None, reference, longest, settings, kind, log, on_progress)
    measured = measured.model_copy(update={"when": today(), "machine": machine_name(device)})
    return serve_verdict(model.name, kind.label, [*results, *answers], measured, way)


class _NoLora(Exception):
    """The server does not support LoRA for models of this kind."""


def _static(
    merged: Checkpoint, lora: ServedAdapter | str | None, settings: ServeSettings, runs_code: bool
) -> tuple[list[Check], str]:
    """Run the static checks of the model that will be served. Return them and a description of how it will be served.

    Args:
        lora: Base and adapter, the reason why they are served merged, or None without an adapter.
    """
    if isinstance(lora, ServedAdapter):
        return [*static_checks(lora.base, must_chat=settings.chat, runs_code=runs_code), lora.static_check()], lora.way
    return static_checks(merged, must_chat=settings.chat, runs_code=runs_code), f"served merged: {lora}" if lora else ""


def smoke_url(
    url: str,
    settings: ServeSettings,
    *,
    model: str | None = None,
    checkpoint: Model | None = None,
    device: str = "cpu",
    key: str = "",
    on_progress: OnStep = lambda done, doing: None,
) -> ServeVerdict:
    """Check the answers of a server that is already running.

    Args:
        model: Name of the model on the server; None for the first model that the server lists.
        checkpoint: Checkpoint that the server should be serving. Without it, no reference answers are available.
        key: Bearer token for the server.

    Raises:
        InvalidInput: The server does not answer, or does not list the model.
    """
    client = Client(url, settings.request_timeout, key)
    try:
        answer = client.request("/v1/models")
    except Unreachable as error:
        raise InvalidInput(url, found=str(error), expected="a server that speaks the OpenAI API") from None
    if answer.status != 200:
        remedy = "the address without /v1; --api-key-env for a server that wants a key"
        raise InvalidInput(f"{url}/v1/models", found=answer.complaint, expected="a list of models", remedy=remedy)
    listed = models_of(answer)
    if not listed or (model is not None and model not in listed):
        serves = f"serves {', '.join(listed) or 'no model'}"
        raise InvalidInput(f"{url}/v1/models", found=serves, expected=model or "a model")
    name = model or next(iter(listed))
    reference, results = None, list[Check]()
    longest = settings.max_model_len or listed[name]
    if checkpoint is not None:
        on_progress(1, "static checks, and what transformers says")
        opened = open_checkpoint(checkpoint.directory)
        results = static_checks(opened, must_chat=settings.chat)
        if not any(check.outcome == "fail" for check in results):
            reference = _reference(checkpoint, opened, settings, device, longest or context_of(settings, opened))
    probe = ServerProbe(ServedSubject(client, name, settings, reference, longest), on_progress)
    try:
        probe.run()
    except Unreachable as error:
        probe.note_no_answer(str(error))
    return serve_verdict(name, url, [*results, *probe.checks], _measured(probe).model_copy(update={"when": today()}))


def _reference(model: Model, checkpoint: Checkpoint, settings: ServeSettings, device: str, longest: int) -> Reference:
    """Compute the expected answers with transformers, in the dtype in which the model is served."""
    dtype = dtype_of(settings, checkpoint)
    return call_model_process(
        make_reference,
        (model, tuple(settings.texts), settings.prompts[0], dtype, device, longest),
        location=f"{model.name} in transformers",
        models=[model],
    )


class ServerProbe:
    """Sequence of checks on a running server. The results so far are available at any time."""

    def __init__(self, subject: ServedSubject, on_progress: OnStep = lambda done, doing: None) -> None:
        self._asked, self._on_progress = subject, on_progress
        self.question = "a first answer"  # current or latest question
        self.checks: list[Check] = []
        self.speed = Speed()

    def run(self, server: ServerProcess | None = None) -> None:
        """Run all checks.

        Raises:
            ServerEnded: ``server`` ended during a check.
            Unreachable: The server still runs but does not answer.
        """
        try:
            self._on_progress(3, f"asking for {self.question}")
            subject = replace(self._asked, extended=checks.takes_extensions(self._asked))
            for done, (self.question, ask) in enumerate(_QUESTIONS, start=3):
                self._on_progress(done, f"asking for {self.question}")
                answers = ask(subject)
                self.checks += answers
                # A dying engine answers with HTTP 5xx and exits a moment later.
                if server and any("HTTP 5" in check.seen for check in answers) and server.has_died():
                    raise server.ended()
            self.question = "throughput"
            self._on_progress(STEPS - 1, "measuring speed")
            answers, self.speed = measure_speed(subject)
            self.checks += answers
            self._on_progress(STEPS, "ending")
        except Unreachable as error:
            if server and not error.timed_out and server.has_died():
                raise server.ended() from None
            raise

    def note_no_answer(self, why: str) -> None:
        """Record that the server did not answer the latest question."""
        remedy = "serve.request_timeout for a slow machine; else see the server's log"
        self.checks.append(Check(name=self.question, outcome="fail", seen=why, expected="an answer", remedy=remedy))

    def note_end(self, end: ServerEnded, log: Path) -> None:
        """Record that the server ended during the latest question."""
        self.checks.append(
            Check(
                name="server lives",
                outcome="fail",
                where=log.name,
                seen=f"ended when asked for {self.question}: {end.cause}",
                expected="a server that goes on answering",
                remedy="the log has the whole story",
            )
        )


def _serve(
    checkpoint: Checkpoint,
    lora: ServedAdapter | None,
    reference: Reference,
    longest: int,
    settings: ServeSettings,
    kind: ServerKind,
    log: Path,
    on_progress: OnStep,
) -> tuple[list[Check], ServingCost]:
    """Start the server, check its answers, and return the checks and the cost.

    Raises:
        _NoLora: The server does not support ``lora`` for this kind of model.
        MachineFailed: The server cannot run on this machine.
    """
    on_progress(2, f"waiting for {kind.label}")
    compile_server(kind)
    command = launch(settings, kind, lora.base if lora else checkpoint, lora.arguments if lora else None)
    server = ServerProcess(command, log, settings)
    probe: ServerProbe | None = None
    results: list[Check] = []
    expected = f"an answer within {settings.startup_timeout:g} s"
    try:
        with server:
            server.await_ready(lambda seconds: on_progress(2, f"waiting for {kind.label}: {seconds:.0f} s"))
            seen = f"after {server.seconds_to_ready or 0:.1f} s"
            results = [Check(name="ready", outcome="pass", seen=seen, expected=expected)]
            client = Client(server.url, settings.request_timeout)
            base = base_name(server.model) if lora else None
            subject = ServedSubject(client, server.model, settings, reference, longest, base=base)
            probe = ServerProbe(subject, on_progress)
            probe.run(server)
    except ServerEnded as end:
        if lora and probe is None and (match := _KNOWS_NO_LORA.search(end.cause)):
            raise _NoLora(match[1]) from None
        _raise_unless_model(end, kind, log)
        if probe is None:
            remedy = "the log has the whole story"
            seen = f"ended before it answered: {end.cause}"
            results = [Check(name="ready", outcome="fail", seen=seen, expected=expected, where=log.name, remedy=remedy)]
        else:
            probe.note_end(end, log)
    except Unreachable as error:
        if probe is None:
            raise
        probe.note_no_answer(str(error))
    return [*results, *(probe.checks if probe else ())], _measured(probe, server)


def _measured(probe: ServerProbe | None, server: ServerProcess | None = None) -> ServingCost:
    """Return the measured cost. Memory is known only for a server that we started, after it has ended."""
    speed = probe.speed if probe else Speed()
    return ServingCost(
        seconds_to_ready=server.seconds_to_ready if server else None,
        seconds_to_first_token=speed.seconds_to_first_token,
        tokens_per_second=speed.tokens_per_second,
        peak_memory=server.peak_memory if server else None,
        peak_gpu_memory=server.peak_gpu_memory if server else None,
    )


def _raise_unless_model(end: ServerEnded, kind: ServerKind, log: Path) -> None:
    """Raise an error if the machine or the settings, not the model, made the server end."""
    if end.blame == "machine":
        raise MachineFailed(
            "serve",
            found=f"{kind.label} could not be run on this machine: {end.cause}\n  log: {log}",
            expected="memory and devices for the server; the model is not to blame, and not judged",
            remedy="free memory, a smaller serve.max_model_len, a (larger) GPU, serve.startup_timeout for a slow start",
        )
    if end.blame == "settings":
        raise WronglyConfigured(
            "serve",
            found=f"{kind.label} was called wrongly: {end.cause}\n  log: {log}",
            expected="arguments that it knows; the model is not to blame, and not judged",
            remedy="correct serve.arguments, serve.max_model_len or serve.command",
        )
