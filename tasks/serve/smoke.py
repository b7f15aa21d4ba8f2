"""Run the smoke test: static checks, reference answers, server, checks of its answers, and verdict."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import Model, PinnedCheckpoint, call_model_process
from mergegate.tasks.http import Unreachable
from mergegate.tasks.serve import checks
from mergegate.tasks.serve.checks import ServedSubject, ServerCheck
from mergegate.tasks.serve.client import Client, base_address, parse_models
from mergegate.tasks.serve.launch import ServerKind, compile_server, context_length, launch, serving_dtype
from mergegate.tasks.serve.lora import ServedAdapter, base_name, plan_lora
from mergegate.tasks.serve.measurements import ServingCost, machine_name, today
from mergegate.tasks.serve.picture_check import check_pictures
from mergegate.tasks.serve.process import ServerEnded, ServerProcess
from mergegate.tasks.serve.reference import Reference, ReferenceRequest, make_reference
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.speed import Speed, measure_speed
from mergegate.tasks.serve.static_checks import check_finite, static_checks
from mergegate.tasks.serve.verdict import Check, MachineFailed, ServeVerdict, WronglyConfigured, serve_verdict

LOG = "server.log"
_LORA_UNSUPPORTED = re.compile(r"(\w+) does not support LoRA")  # vLLM's message about an architecture
_CHECKS: tuple[tuple[str, ServerCheck], ...] = (
    ("text", checks.check_generation),
    ("parity", checks.check_parity),
    ("the effect of the adapter", checks.check_adapter),
    ("tokenizer", checks.check_tokenizer),
    ("chat", checks.check_chat),
    ("two pictures", check_pictures),
    ("end of sequence", checks.check_ends),
    ("over-long prompt", checks.check_length_limit),
)
_SEE_LOG = "see the log for details"
STEPS = len(_CHECKS) + 4  # plus static checks, reference, server start and throughput

OnStep = Callable[[int, str], None]  # receives the number of finished steps out of ``STEPS``, and the current step


@dataclass(frozen=True)
class SmokeSetup:
    """Server to start, device for computing the reference with transformers, and file for the server's output."""

    kind: ServerKind
    device: str
    log: Path


@dataclass(frozen=True)
class RunningServer:
    """A server that is already running.

    ``url`` may end with ``/v1``. ``model`` is the name of the model on the server, or None for the first that the
    server lists. ``key`` is a bearer token.
    """

    url: str
    model: str | None = None
    key: str = ""


def smoke_checkpoint(
    model: Model,
    settings: ServeSettings,
    setup: SmokeSetup,
    *,
    adapted_model: PinnedCheckpoint | None = None,
    on_progress: OnStep = lambda done, step: None,
) -> ServeVerdict:
    """Serve ``model`` and check the server's answers.

    If ``model`` is an adapter merged into its base, ``adapted_model`` names the two separately. vLLM then serves the
    adapter as LoRA if it can. The reference is always computed from ``model``.

    Raises:
        InvalidInput: The checkpoint cannot be read.
        MachineFailed: The server cannot run on this machine, which says nothing about the model.
    """
    on_progress(0, "static checks")
    checkpoint = open_checkpoint(model.directory)
    if model.runs_code:
        settings = settings.model_copy(update={"arguments": (*settings.arguments, "--trust-remote-code")})
    lora = plan_lora(adapted_model, setup.kind, settings) if adapted_model else None
    reference: Reference | None = None
    while True:
        if isinstance(lora, ServedAdapter):
            results = static_checks(lora.base, must_chat=settings.chat)
            factors = replace(lora.base, tensors={tensor.name: tensor for tensor in lora.adapter.stored_tensors})
            results.append(check_finite(factors).model_copy(update={"name": "finite factors"}))
            way = lora.description
        else:
            results = static_checks(checkpoint, must_chat=settings.chat)
            way = f"served merged: {lora}" if lora else ""
        if any(check.outcome == "fail" for check in results):
            return serve_verdict(model.name, setup.kind.label, results, way=way)  # refuse without starting a server
        longest = context_length(settings, checkpoint)
        if reference is None:
            on_progress(1, "computing the reference with transformers")
            reference = _reference(model, checkpoint, settings, setup.device, longest)
        subject = _Served(checkpoint, lora if isinstance(lora, ServedAdapter) else None, reference, longest)
        try:
            answers, measured = _serve(subject, settings, setup, on_progress)
        except _LoraUnsupported as error:
            lora = f"vLLM does not support LoRA for {error}"
            continue
        measured = measured.model_copy(update={"when": today(), "machine": machine_name(setup.device)})
        return serve_verdict(model.name, setup.kind.label, [*results, *answers], measured, way)


class _LoraUnsupported(Exception):
    """The server does not support LoRA for this architecture."""


def smoke_url(
    server: RunningServer,
    settings: ServeSettings,
    *,
    checkpoint: Model | None = None,
    device: str = "cpu",
    on_progress: OnStep = lambda done, step: None,
) -> ServeVerdict:
    """Check the answers of a server that is already running.

    ``checkpoint`` is the model that the server should be serving. Without it, no checks that need a reference run.
    Raise InvalidInput if the server does not answer, or does not list the model.
    """
    url = base_address(server.url)
    client = Client(url, settings.request_timeout, server.key)
    try:
        answer = client.request("/v1/models")
    except Unreachable as error:
        raise InvalidInput(
            url,
            found=str(error),
            expected="a server with the OpenAI API",
            remedy="check the address, and that the server is running",
        ) from None
    if answer.status != 200:
        raise InvalidInput(
            f"{url}/v1/models",
            found=answer.complaint,
            expected="a list of models",
            remedy="check the address, and pass --api-key-env if the server requires a key",
        )
    models = parse_models(answer)
    if not models or (server.model is not None and server.model not in models):
        raise InvalidInput(
            f"{url}/v1/models",
            found=f"the server serves {', '.join(models) or 'no model'}",
            expected=server.model or "a model",
        )
    name = server.model or next(iter(models))
    reference, results, reads_pictures = None, list[Check](), False
    longest = settings.max_model_len or models[name]
    if checkpoint is not None:
        on_progress(1, "static checks, and computing the reference with transformers")
        opened = open_checkpoint(checkpoint.directory)
        reads_pictures = "pictures" in kind_of(opened).task_forms
        results = static_checks(opened, must_chat=settings.chat)
        if not any(check.outcome == "fail" for check in results):
            reference = _reference(checkpoint, opened, settings, device, longest or context_length(settings, opened))
    subject = ServedSubject(client, name, settings, reference, longest, reads_pictures=reads_pictures)
    probe = ServerProbe(subject, on_progress)
    try:
        probe.run()
    except Unreachable as error:
        probe.record_no_answer(str(error))
    measured = probe.cost().model_copy(update={"when": today()})
    return serve_verdict(name, url, [*results, *probe.checks], measured)


def _reference(model: Model, checkpoint: Checkpoint, settings: ServeSettings, device: str, longest: int) -> Reference:
    """Compute the expected answers in the dtype in which the server computes."""
    dtype = serving_dtype(settings, checkpoint)
    request = ReferenceRequest(tuple(settings.texts), settings.prompts[0], dtype, device, longest)
    return call_model_process(
        make_reference, (model, request), location=f"{model.name} in transformers", models=[model]
    )


class ServerProbe:
    """Checks of a running server. After an error, ``checks`` has the results up to then."""

    def __init__(self, subject: ServedSubject, on_progress: OnStep = lambda done, step: None) -> None:
        self._subject, self._on_progress = subject, on_progress
        self.step = "a first answer"  # current or latest check
        self._speed = Speed()
        self.checks: list[Check] = []

    def run(self, server: ServerProcess | None = None) -> None:
        """Run all checks.

        Raises:
            ServerEnded: ``server`` ended during a check.
            Unreachable: The server still runs but does not answer.
        """
        try:
            self._on_progress(3, f"checking {self.step}")
            # Find out whether the server accepts or ignores vLLM's additional fields. The request also warms it up.
            # Use the longest prompt: vLLM 0.32 on a CPU with AMX may use AMX only from the first larger multiplication
            # on, and dies of SIGILL if its very first prompt has only a few tokens.
            subject, prompt = self._subject, max(self._subject.settings.prompts, key=len)
            if subject.complete(prompt, 1, extension={"return_token_ids": True}).status in (400, 422):
                plain = replace(subject, extended=False)
                subject = plain if plain.complete(prompt, 1).status == 200 else subject
            for done, (self.step, check) in enumerate(_CHECKS, start=3):
                self._on_progress(done, f"checking {self.step}")
                results = check(subject)
                self.checks += results
                # A dying engine answers with HTTP 5xx and exits a moment later.
                if server and any("HTTP 5" in result.seen for result in results) and server.has_died():
                    raise server.diagnose()
            self.step = "throughput"
            self._on_progress(STEPS - 1, "measuring speed")
            results, self._speed = measure_speed(subject)
            self.checks += results
            self._on_progress(STEPS, "stopping the server")
        except Unreachable as error:
            if server and not error.timed_out and server.has_died():
                raise server.diagnose() from None
            raise

    def record_no_answer(self, reason: str) -> None:
        """Add a failed check with ``reason``, because the server did not answer during the latest check."""
        remedy = "increase serve.request_timeout for a slow machine; otherwise see the server's log"
        self.checks.append(Check.failed_check(self.step, reason, "an answer", remedy))

    def cost(self, server: ServerProcess | None = None) -> ServingCost:
        """Return the measured cost. Memory is known only for a ``server`` that mergegate started and that has ended."""
        return ServingCost(
            seconds_to_ready=server.seconds_to_ready if server else None,
            seconds_to_first_token=self._speed.seconds_to_first_token,
            tokens_per_second=self._speed.tokens_per_second,
            peak_memory=server.peak_memory if server else None,
            peak_gpu_memory=server.peak_gpu_memory if server else None,
        )


class _Served(NamedTuple):
    """A checkpoint, or an adapter with its base, and the expected answers."""

    checkpoint: Checkpoint
    lora: ServedAdapter | None
    reference: Reference
    longest: int  # longest request in tokens


def _serve(
    served_subject: _Served, settings: ServeSettings, setup: SmokeSetup, on_progress: OnStep
) -> tuple[list[Check], ServingCost]:
    """Start the server, check its answers, and return the checks and the cost.

    Raises:
        _LoraUnsupported: The server does not support LoRA for this architecture.
        MachineFailed: The server cannot run on this machine.
    """
    kind, log, lora = setup.kind, setup.log, served_subject.lora
    on_progress(2, f"waiting for {kind.label}")
    compile_server(kind)
    command = (
        launch(settings, kind, lora.base, lora.arguments, lora.adapter)
        if lora
        else launch(settings, kind, served_subject.checkpoint)
    )
    server = ServerProcess(command, log, settings)
    probe: ServerProbe | None = None
    results: list[Check] = []
    expected = f"an answer within {settings.startup_timeout:g} s"
    try:
        with server:
            server.await_ready(lambda seconds: on_progress(2, f"waiting for {kind.label}: {seconds:.0f} s"))
            results = [Check.passed_check("ready", f"after {server.seconds_to_ready or 0:.1f} s", expected)]
            client = Client(server.url, settings.request_timeout)
            subject = ServedSubject(
                client,
                server.model,
                settings,
                served_subject.reference,
                served_subject.longest,
                base=base_name(server.model) if lora else None,
                reads_pictures="pictures" in kind_of(served_subject.checkpoint).task_forms,
            )
            probe = ServerProbe(subject, on_progress)
            probe.run(server)
    except ServerEnded as end:
        if lora and probe is None and (match := _LORA_UNSUPPORTED.search(end.cause)):
            raise _LoraUnsupported(match[1]) from None
        if end.blame == "machine":
            raise MachineFailed(
                "serve",
                found=f"{kind.label} could not be run on this machine: {end.cause}\n  log: {log}",
                expected="enough memory and devices for the server; this says nothing about the model",
                remedy="free memory, decrease serve.max_model_len, use a (larger) GPU, or increase "
                "serve.startup_timeout for a slow start",
            ) from None
        if end.blame == "settings":
            raise WronglyConfigured(
                "serve",
                found=f"{kind.label} rejected its command line: {end.cause}\n  log: {log}",
                expected="arguments that the server supports; this says nothing about the model",
                remedy="correct serve.arguments, serve.max_model_len or serve.command",
            ) from None
        if probe is None:
            seen = f"ended before it answered: {end.cause}"
            results = [Check.failed_check("ready", seen, expected, _SEE_LOG, log.name)]
        else:
            seen = f"ended while mergegate checked {probe.step}: {end.cause}"
            expected = "a server that continues to answer"
            probe.checks.append(Check.failed_check("server lives", seen, expected, _SEE_LOG, log.name))
    except Unreachable as error:
        if probe is None:
            raise
        probe.record_no_answer(str(error))
    if probe is None:
        return results, ServingCost(peak_memory=server.peak_memory, peak_gpu_memory=server.peak_gpu_memory)
    return [*results, *probe.checks], probe.cost(server)
