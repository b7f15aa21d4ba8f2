"""Serve models as a stage of the release, cached by model content, settings and server version.

The smoke test runs static checks, computes reference answers, starts the server, and checks its answers::

    served = serve_models(profile.serve, profile.root, merged_model(merged), pinned.parents)   # None without ``serve``
    refusal = served.verdict.publication_error() if served else None
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.errors import ChangedInput, InvalidInput, MergegateError
from mergegate.tasks.base.http import JsonClient, Unreachable
from mergegate.tasks.base.stage import Runtime, advance, home, runtime, stage
from mergegate.tasks.models.checkpoints import Model, PinnedCheckpoint, call_model_process
from mergegate.tasks.quality.serve.answers import Reference, ReferenceRequest, make_reference, parse_models
from mergegate.tasks.quality.serve.checks import CHECKS, ServedSubject, measure_speed
from mergegate.tasks.quality.serve.launch import (
    ServedAdapter,
    ServerVersion,
    base_name,
    compile_server,
    context_length,
    find_server,
    launch,
    plan_lora,
    serving_dtype,
)
from mergegate.tasks.quality.serve.process import ServerEnded, ServerProcess
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.static_checks import check_finite, static_checks
from mergegate.tasks.quality.serve.verdict import (
    Check,
    MachineFailed,
    Measurement,
    ServedModels,
    ServeVerdict,
    ServingCost,
    WronglyConfigured,
    machine_name,
    serve_verdict,
    today,
)

LOG = "server.log"
_LORA_UNSUPPORTED = re.compile(r"(\w+) does not support LoRA")  # vLLM's message about an architecture
STEPS = len(CHECKS) + 4  # plus static checks, reference, server start and throughput

OnStep = Callable[[int, str], None]  # receives the number of finished steps out of ``STEPS``, and the current step


@dataclass(frozen=True)
class SmokeSetup:
    """Server to start, device for computing the reference with transformers, and file for the server's output."""

    server: ServerVersion
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


def serve_models(
    settings: ServeSettings | None,
    root: Path,
    merge: Model,
    parents: Sequence[Model] = (),
    adapted_model: PinnedCheckpoint | None = None,
) -> ServedModels | None:
    """Serve the merge and, if ``settings.parents`` is set, its parents. Return None if ``settings`` is None.

    The parents are served only for comparison. Neither their answers nor a failure to serve them refuses the merge.

    If the merge is an adapter, ``merge`` is the base with the adapter merged into it, and ``adapted_model`` names the
    base and the adapter separately.

    Raises:
        InvalidInput: The server is not installed, or the merge cannot be read.
        MachineFailed: The server cannot run on this machine.
    """
    if settings is None:
        return None
    server = find_server(settings, root)
    verdict = serve(merge, settings, server, runtime(), adapted_model).value
    if not settings.parents or verdict.refuses():
        return ServedModels(verdict=verdict)
    # A parent may be a base model, which need not chat.
    settings = settings.model_copy(update={"chat": None})
    measurements: dict[str, Measurement] = {}
    for parent in parents:
        try:
            measurements[parent.name] = measure_parent(parent, settings, server, runtime()).value
        except ChangedInput:
            raise
        except MergegateError as error:
            problem = error.found.splitlines()[0]
            measurements[parent.name] = Measurement(model=parent.name, server=server.label, problem=problem)
    return ServedModels(verdict=verdict, parents=measurements)


@stage("serve", version=4)
def serve(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    """Serve ``model`` and check the server's answers. The artifact holds ``server.log`` if a server was started.

    Raises:
        InvalidInput: The checkpoint cannot be read.
        MachineFailed: The server cannot run on this machine. There is no verdict then, and only the log is stored,
            under ``logs`` in mergegate's home directory.
    """
    return _smoke(out, model, settings, server, runtime, adapted)


@stage("measure", version=2, subject="model")
def measure_parent(
    out: Path, model: Model, settings: ServeSettings, server: ServerVersion, runtime: Runtime
) -> Measurement:
    """Serve ``model`` to measure its cost, with the same checks and errors as :func:`serve` but without a verdict."""
    verdict = _smoke(out, model, settings, server, runtime)
    is_measured = verdict.measured.tokens_per_second is not None
    problem = "" if is_measured or not verdict.failures else str(verdict.failures[0])
    return Measurement(model=model.name, server=server.label, measured=verdict.measured, problem=problem)


def _smoke(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted_model: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    log = out / LOG
    setup = SmokeSetup(server, runtime.device, log)

    try:
        return smoke_checkpoint(
            model,
            settings,
            setup,
            adapted_model=adapted_model,
            on_progress=lambda done, step: advance(done, STEPS, "steps"),
        )
    except MachineFailed as error:
        if not log.exists():
            raise
        log_copy = home() / "logs" / f"serve-{model.digest[:12]}.log"
        log_copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, log_copy)
        message = error.found.replace(str(log), str(log_copy))
        raise type(error)(error.where, found=message, expected=error.expected, remedy=error.remedy) from None


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
    lora = plan_lora(adapted_model, setup.server, settings) if adapted_model else None
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
            return serve_verdict(model.name, setup.server.label, results, way=way)  # refuse without starting a server
        longest = context_length(settings, checkpoint)
        if reference is None:
            on_progress(1, "computing the reference with transformers")
            reference = _reference(model, checkpoint, settings, setup.device, longest)
        served_subject = _Served(checkpoint, lora if isinstance(lora, ServedAdapter) else None, reference, longest)
        try:
            answers, measured = _serve(served_subject, settings, setup, on_progress)
        except _LoraUnsupported as error:
            lora = f"vLLM does not support LoRA for {error}"
            continue
        measured = measured.model_copy(update={"when": today(), "machine": machine_name(setup.device)})
        return serve_verdict(model.name, setup.server.label, [*results, *answers], measured, way)


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
    url = server.url.rstrip("/").removesuffix("/v1")  # which every path of the API starts with
    client = JsonClient(url, settings.request_timeout, server.key)
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
    probe.run()
    return serve_verdict(name, url, [*results, *probe.checks], probe.cost.model_copy(update={"when": today()}))


def _reference(model: Model, checkpoint: Checkpoint, settings: ServeSettings, device: str, longest: int) -> Reference:
    dtype = serving_dtype(settings, checkpoint)
    request = ReferenceRequest(tuple(settings.texts), settings.prompts[0], dtype, device, longest)
    return call_model_process(
        make_reference, (model, request), location=f"{model.name} in transformers", models=[model]
    )


class ServerProbe:
    """Checks of a running server. After an error, ``checks`` and ``cost`` have the results up to then."""

    def __init__(self, subject: ServedSubject, on_progress: OnStep) -> None:
        self._subject, self._on_progress = subject, on_progress
        self.step = "a first answer"  # current or latest check
        self.checks: list[Check] = []
        self.cost = ServingCost()

    def run(self, server: ServerProcess | None = None) -> None:
        """Run all checks. If the server still runs but does not answer, the last check has failed.

        Raises:
            ServerEnded: ``server`` ended during a check.
        """
        try:
            self._run(server)
        except Unreachable as error:
            if server and not error.timed_out and server.has_died():
                raise server.diagnose() from None
            remedy = "increase serve.request_timeout for a slow machine; otherwise see the server's log"
            self.checks.append(Check.failed_check(self.step, str(error), "an answer", remedy))

    def _run(self, server: ServerProcess | None) -> None:
        self._on_progress(3, f"checking {self.step}")
        # Find out whether the server accepts or ignores vLLM's additional fields. The request also warms it up.
        # Use the longest prompt: vLLM 0.32 on a CPU with AMX may use AMX only from the first larger multiplication
        # on, and dies of SIGILL if its very first prompt has only a few tokens.
        subject, prompt = self._subject, max(self._subject.settings.prompts, key=len)
        if subject.complete(prompt, 1, extension={"return_token_ids": True}).status in (400, 422):
            plain = replace(subject, extended=False)
            subject = plain if plain.complete(prompt, 1).status == 200 else subject
        for done, (self.step, check) in enumerate(CHECKS, start=3):
            self._on_progress(done, f"checking {self.step}")
            results = check(subject)
            self.checks += results
            # A dying engine answers with HTTP 5xx and exits a moment later.
            if server and any("HTTP 5" in result.seen for result in results) and server.has_died():
                raise server.diagnose()
        self.step = "throughput"
        self._on_progress(STEPS - 1, "measuring speed")
        throughput, self.cost = measure_speed(subject)
        self.checks.append(throughput)
        self._on_progress(STEPS, "stopping the server")


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
    label, log, lora = setup.server.label, setup.log, served_subject.lora
    on_progress(2, f"waiting for {label}")
    compile_server(setup.server)
    server = ServerProcess(launch(settings, setup.server, lora or served_subject.checkpoint), log, settings)
    probe: ServerProbe | None = None
    checks, last = list[Check](), list[Check]()
    expected = f"an answer within {settings.startup_timeout:g} s"
    try:
        with server:
            server.await_ready(lambda seconds: on_progress(2, f"waiting for {label}: {seconds:.0f} s"))
            checks.append(Check.passed_check("ready", f"after {server.seconds_to_ready or 0:.1f} s", expected))
            subject = ServedSubject(
                JsonClient(server.url, settings.request_timeout),
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
                found=f"{label} could not be run on this machine: {end.cause}\n  log: {log}",
                expected="enough memory and devices for the server; this says nothing about the model",
                remedy="free memory, decrease serve.max_model_len, use a (larger) GPU, or increase "
                "serve.startup_timeout for a slow start",
            ) from None
        if end.blame == "settings":
            raise WronglyConfigured(
                "serve",
                found=f"{label} rejected its command line: {end.cause}\n  log: {log}",
                expected="arguments that the server supports; this says nothing about the model",
                remedy="correct serve.arguments, serve.max_model_len or serve.command",
            ) from None
        name, seen = "ready", f"ended before it answered: {end.cause}"
        if probe is not None:
            name, expected = "server lives", "a server that continues to answer"
            seen = f"ended while mergegate checked {probe.step}: {end.cause}"
        last = [Check.failed_check(name, seen, expected, "see the log for details", log.name)]
    cost = (probe.cost if probe else ServingCost()).model_copy(
        update={
            "seconds_to_ready": server.seconds_to_ready,
            "peak_memory": server.peak_memory,
            "peak_gpu_memory": server.peak_gpu_memory,
        }
    )
    return [*checks, *(probe.checks if probe else ()), *last], cost
