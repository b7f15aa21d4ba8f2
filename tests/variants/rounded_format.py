"""Define ``rounded``, a variant format for tests that needs no tool outside mergegate's own environment."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
from pydantic import BeforeValidator, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage import stage, value_stage, versions
from mergegate.tasks.base.store import Artifact, StoredValue
from mergegate.tasks.models.checkpoints import Model, QuantizedModel, deciding_files
from mergegate.tasks.quality.serve import Check, ServeSettings
from mergegate.tasks.quality.variants import ConversionCheck, VariantFormat, VariantRecord, variant_formats

Fault = Literal[
    "environment",  # the quantizer is not installed
    "conversion",  # the converted file disagrees with the merge
    "build",  # the quantizer refuses
    "scales",  # the rows of one matrix have wrong scales
    "swapped",  # two matrices of equal shape are exchanged
    "tokenizer",  # the tokenizer gives different ids
    "template",  # the chat template is missing
    "truncated",  # the weights end early
    "answers",  # the serving runtime does not answer
]
Texts = Callable[[], Sequence[str]]
WEIGHTS = "model.safetensors"
SITE = Path(__file__).parent


class RoundedFormat(VariantFormat):
    """Weights rounded to a few bits per row, for tests."""

    format: Literal["rounded"]
    bits: Annotated[tuple[int, ...], BeforeValidator(lambda bits: (bits,) if isinstance(bits, int) else bits)] = Field(
        min_length=1, description="Bits per weight: a number or a list."
    )
    converts: bool = Field(default=True, description="Whether the format has an unquantized form. Default: true.")
    fault: Fault | None = Field(default=None, description="Deliberate fault. Default: none.")

    @property
    def variant_types(self) -> tuple[str, ...]:
        return tuple(f"R{bits}" for bits in self.bits)

    @property
    def place_suffix(self) -> str:
        return self.suffix or "Rounded"

    @property
    def library_name(self) -> str:
        return "transformers"

    def check(self, root: Path) -> str:
        if self.fault == "environment":
            found, remedy = "the rounder is not installed", "run 'make rounded-env'"
            raise InvalidInput("variants.rounded", found=found, expected="its environment", remedy=remedy)
        return "rounder 1.0"

    def convert(self, merge: Model, texts: Texts, root: Path) -> StoredValue[ConversionCheck] | None:
        return compare_rounded(merge, tuple(texts()), self.fault) if self.converts else None

    def build(self, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        return round_weights(merge, variant_type, self.fault)

    def open(self, merge: Model, variant_type: str, artifact: Artifact[VariantRecord]) -> QuantizedModel:
        files = tuple(sorted(artifact.files.items()))
        fields = {"digest": artifact.digest, "directory": artifact.directory, "files": files}
        return QuantizedModel(name=variant_type, source=merge, backend="hf", **fields)

    def inspect(self, model: QuantizedModel) -> Sequence[Check]:
        checks = []
        for name in ("tokenizer.json", "chat_template.jinja"):
            file, original = model.directory / name, model.source.directory / name
            what = name.partition(".")[0].replace("_", " ")
            if not original.exists():
                continue
            if file.exists() and file.read_bytes() == original.read_bytes():
                checks.append(Check.passed_check(what, "that of the merge"))
            else:
                found = "differs from that of the merge" if file.exists() else "is missing"
                checks.append(Check.failed_check(what, found, "that of the merge", "build the variant again", name))
        weights = model.directory / WEIGHTS
        try:
            with safe_open(weights, "pt") as content:
                checks.append(Check.passed_check("weights", f"{len(content.keys())} tensors"))
        except SafetensorError as error:
            checks.append(Check.failed_check("weights", str(error), "a complete file", "build it again", str(weights)))
        return checks

    def smoke(self, model: QuantizedModel, serve: ServeSettings | None, root: Path) -> Sequence[Check]:
        if self.fault == "answers":
            return [Check.failed_check("text", "no answer to 'rev: abcd>'", "an answer", "read the server's log")]
        return [Check.passed_check("text", "an answer")]

    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        if len(self.bits) == 1:
            return {file: artifact.directory / file for file in artifact.value.files}
        return {f"{name}-{artifact.value.type}.safetensors": artifact.directory / WEIGHTS}


@value_stage("agreement", version=1, subject="merge")
def compare_rounded(merge: Model, texts: tuple[str, ...], fault: Fault | None) -> ConversionCheck:
    """Pretend to compare an unquantized file with the merge."""
    difference = 3.25 if fault == "conversion" else 0.0
    problems = (f"the converted file differs from the merge by {difference} nats per document",) * bool(difference)
    texts_found = {"documents": len(texts), "texts": len(texts), "different_texts": (), "problems": problems}
    return ConversionCheck(mean_difference=difference, max_difference=2 * difference, limit=0.05, **texts_found)


@stage("variant", version=1, hashes_of=lambda record: {}, subject="merge")
def round_weights(out: Path, merge: Model, variant_type: str, fault: Fault | None) -> VariantRecord:
    """Round the matrices of ``merge``, and copy the files next to its weights."""
    if fault == "build":
        found = "model.layers.0.mlp.up_proj.weight has 97 columns"
        wanted, remedy = "a multiple of 32", "use another type"
        raise Refused(f"variant {variant_type}", found=found, expected=wanted, remedy=remedy)
    names = [name for name, _ in merge.files] or deciding_files(merge.directory)
    weights = {}
    for name in names:
        if name.endswith(".safetensors"):
            weights |= load_file(merge.directory / name)
        elif name != "value.json" and not name.endswith(".index.json"):  # the record of a merge has times
            (out / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(merge.directory / name, out / name)
    bits = int(variant_type[1:])
    rounded = {name: round_rows(tensor, bits) for name, tensor in weights.items()}
    save_file(break_weights(rounded, fault), out / WEIGHTS, {"format": "pt"})
    break_files(out, fault)
    files = sorted((path.name for path in out.iterdir()), key=lambda name: (name != WEIGHTS, name))
    matrices = sum(tensor.dim() == 2 for tensor in weights.values())
    size = sum((out / name).stat().st_size for name in files)
    types = {f"R{bits}": matrices, "BF16": len(weights) - matrices}
    record = {"files": tuple(files), "bytes": size, "tensor_types": types, "settings": {"bits": str(bits)}}
    return VariantRecord(
        format="rounded", type=variant_type, versions={"rounder": "1.0", **versions("torch")}, **record
    )


def round_rows(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix to ``bits`` bits per weight, with the largest absolute value of each row as its scale."""
    if tensor.dim() != 2:
        return tensor.contiguous()
    values = tensor.float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / max(2 ** (bits - 1) - 1, 1)
    return ((values / scales).round() * scales).to(tensor.dtype)


def break_weights(weights: dict[str, torch.Tensor], fault: Fault | None) -> dict[str, torch.Tensor]:
    if fault == "scales":
        return {name: tensor * 4 if name.endswith("down_proj.weight") else tensor for name, tensor in weights.items()}
    if fault == "swapped":
        first, second = [name for name in sorted(weights) if name.endswith("q_proj.weight")][:2]
        return {**weights, first: weights[second], second: weights[first]}
    return weights


def break_files(directory: Path, fault: Fault | None) -> None:
    if fault == "tokenizer":
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        ids = tokenizer["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif fault == "template":
        (directory / "chat_template.jinja").unlink()
    elif fault == "truncated":
        os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size // 2)


@contextmanager
def rounded_registered(site: Path) -> Iterator[type[VariantFormat]]:
    """Register the format in this process and in processes that it starts, as if a package had been installed."""
    facts = site / "mergegate_rounded-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mergegate-rounded\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[mergegate.variants]\nrounded = rounded_format:RoundedFormat\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), str(SITE), *sys.path])
        path = (str(site), str(SITE), os.environ.get("PYTHONPATH"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        forget_formats()
        yield variant_formats()["rounded"]
    forget_formats()


def forget_formats() -> None:
    from mergegate.flows.profile import Profile  # It imports this module when the format is installed.

    importlib.invalidate_caches()
    variant_formats.cache_clear()
    Profile.model_rebuild(force=True)
