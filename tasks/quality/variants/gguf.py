"""Build GGUF files for llama.cpp, with the converter and the quantizer of one version in an environment of its own.

::

    variants:
      - {format: gguf, types: [Q8_0, Q4_K_M]}

The merge is converted once to a file with float32 weights (``gguf_conversion``), from which every type is quantized.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from mergegate.merge_core.checkpoint import Checkpoint, read_gguf_header
from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.tasks.base.stage import StageValue, runtime, stage, store, value_stage
from mergegate.tasks.base.store import Artifact, StoredValue, digest
from mergegate.tasks.models.checkpoints import Model, OutOfModelMemory, QuantizedModel
from mergegate.tasks.models.llama_cpp import (
    FILE_TYPES,
    AnswerChoice,
    LlamaCpp,
    measure_importance,
    open_gguf,
    quantize,
    runtime_versions,
)
from mergegate.tasks.quality.serve import Chat, Check, ServeSettings, is_loop
from mergegate.tasks.quality.variants.contract import (
    Calibration,
    ConversionCheck,
    VariantFormat,
    VariantRecord,
    require_text_only,
)
from mergegate.tasks.quality.variants.gguf_conversion import (
    FILE,
    SAMPLE_TEXTS,
    GgufTools,
    check_that,
    compare_conversion,
    convert_merge,
    different_texts,
    header_checks,
    read_tokenizer_facts,
    token_problems,
    vocabulary_check,
)

# Types that llama.cpp refuses to build without the importance of each weight.
NEED_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S")
_ANSWER_TOKENS = 32  # of a smoke test


class GgufFormat(VariantFormat):
    """GGUF files for llama.cpp and the programs that contain it."""

    format: Literal["gguf"]
    types: tuple[str, ...] = Field(min_length=1, description="Quantization types of llama.cpp, such as Q8_0 or Q4_K_M.")
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Name of the model in the files (general.name), which programs show. Default: 'merge' and the "
        "first 12 digits of a digest over the names and hashes of the merge's weights.",
    )

    @model_validator(mode="after")
    def _check_types(self) -> Self:
        for name in self.types:
            if name not in FILE_TYPES:
                raise ValueError(
                    f"types: {name!r} is not a quantization type of llama.cpp; {suggest(name, FILE_TYPES)}"
                )
            if name in NEED_IMPORTANCE and self.calibration is None:
                raise ValueError(f"types: {name} needs calibration: {{documents: FILE}}. Q2_K and IQ3_S need no text")
        return self

    @property
    def variant_types(self) -> tuple[str, ...]:
        return self.types

    @property
    def place_suffix(self) -> str:
        return self.suffix or "GGUF"

    @property
    def library_name(self) -> str:
        return "gguf"

    def check(self, root: Path) -> str:
        self.pin_calibration(root, store().hashes)
        return f"llama-cpp-python {self._tools.versions['llama_cpp_python']}"

    def check_shapes(self, checkpoint: Checkpoint) -> None:
        reason = "llama.cpp needs a second file for them (mmproj), which mergegate neither builds nor evaluates"
        require_text_only(checkpoint, "gguf", reason)

    def convert(
        self, merge: Model, texts: Callable[[], Sequence[str]], root: Path
    ) -> StoredValue[ConversionCheck] | None:
        arguments = (merge, self._name_of(merge), tuple(texts()), self.max_different_texts, self._tools, runtime())
        if compare_conversion.find(*arguments) is None:
            convert_merge(merge, self._name_of(merge), self._tools)
        return compare_conversion(*arguments)

    def build(self, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        calibration = self.pin_calibration(root, store().hashes)
        arguments = (merge, self._name_of(merge), variant_type, self._tools, calibration)
        if quantize_gguf.find(*arguments) is None:
            convert_merge(merge, self._name_of(merge), self._tools)
        return quantize_gguf(*arguments)

    def open(self, merge: Model, variant_type: str, artifact: Artifact[VariantRecord]) -> QuantizedModel:
        return QuantizedModel(
            name=variant_type,
            digest=artifact.digest,
            directory=artifact.directory,
            files=tuple(sorted(artifact.files.items())),
            source=merge,
            backend="llama_cpp",
            weights=artifact.value.files[0],
            runtime=tuple(sorted(runtime_versions(self.python).items())),
            python=self._tools.python,
        )

    def inspect(self, model: QuantizedModel) -> Sequence[Check]:
        return inspect_gguf(model, self._tools).value.checks

    def smoke(self, model: QuantizedModel, serve: ServeSettings | None, root: Path) -> Sequence[Check]:
        return answer_with_gguf(model, serve, self._tools).value.checks

    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        return {f"{name}-{artifact.value.type}.gguf": artifact.directory / artifact.value.files[0]}

    @property
    def _tools(self) -> GgufTools:
        return GgufTools.find(self.python)

    def _name_of(self, merge: Model) -> str:
        # A published merge has the same weights, but the digest of the stored merge covers records of the merge, too.
        weights = [[name, sha256] for name, sha256 in sorted(merge.files) if name.endswith(".safetensors")]
        return self.name or f"merge {digest(weights)[:12]}"


# The stages below do not have the converted file among their inputs, but everything that it follows from. So a run with
# nothing new does not need this file, which is the largest of all.


@stage("variant", version=1)
def quantize_gguf(
    out: Path, merge: Model, name: str, variant_type: str, tools: GgufTools, calibration: Calibration | None = None
) -> VariantRecord:
    """Quantize the converted ``merge`` to ``variant_type``. ``name`` is the name of the model in the file.

    llama.cpp stores some tensors in another type, for example because their rows are not divisible by 256. The record
    has the actual types. With ``calibration``, llama.cpp weights the rounding errors of a matrix by the mean squares of
    its inputs (importance matrix).

    Raises:
        Refused: llama.cpp cannot quantize a tensor, or measure the importance of its inputs.
    """
    converted = convert_merge.build(merge, name, tools)
    source, file = converted.directory / FILE, out / f"model-{variant_type}.gguf"
    importance = out / "importance.npz" if calibration else None
    try:
        if calibration and importance:
            texts, limit = calibration.documents(), calibration.max_length
            measure_importance(source, texts, importance, max_length=limit, python=tools.python)
        quantize(source, file, variant_type, python=tools.python, imatrix=importance)
    except OutOfModelMemory:
        raise
    except InvalidInput as error:
        remedy = "use another type, or remove calibration" if calibration else "use another type"
        raise Refused(f"variant {variant_type}", found=error.found, expected=error.expected, remedy=remedy) from None
    if importance:
        importance.unlink()
    header = read_gguf_header(file)
    return VariantRecord(
        format="gguf",
        type=variant_type,
        files=(file.name,),
        bytes=file.stat().st_size,
        tensor_types=dict(sorted(Counter(tensor.type for tensor in header.tensors).items())),
        versions=tools.versions,
        settings={
            "name": name,
            "converted to": "F32",
            "pre-tokenizer": converted.value.pre_tokenizer or "none",
            "importance matrix": f"from {calibration.samples} documents" if calibration else "none",
        },
        calibration=calibration.text.sha256 if calibration else "",
    )


class GgufChecks(StageValue):
    """Checks of a GGUF file."""

    checks: tuple[Check, ...]

    def summary(self) -> str:
        failed = [check for check in self.checks if check.outcome == "fail"]
        return str(failed[0]) if failed else f"{len(self.checks)} checks passed"


@value_stage("inspect", version=1, subject="model")
def inspect_gguf(model: QuantizedModel, tools: GgufTools) -> GgufChecks:
    """Compare a GGUF file with the merge: size, special tokens, chat template, and how llama.cpp splits a sample."""
    file = model.directory / model.weights
    facts = read_tokenizer_facts(model.source, SAMPLE_TEXTS)
    try:
        header = read_gguf_header(file)
        architecture = header.metadata.get("general.architecture")
        seen = f"{architecture}, {len(header.tensors)} tensors, {file.stat().st_size:,} bytes"
        checks = [Check.passed_check("file", seen), *header_checks(header, facts)]
        with open_gguf(file, tools.python, vocabulary_only=True) as opened:
            different = different_texts(facts, opened)
            problems = token_problems(different, facts.probes)
            checks.append(vocabulary_check(opened, facts))
    except InvalidInput as error:
        damage = Check.failed_check("file", error.found, error.expected or "a GGUF file", error.remedy, error.where)
        return GgufChecks(checks=(damage,))
    seen = "; ".join(problems) or f"{len(facts.texts) - len(different)} of {len(facts.texts)} texts agree"
    label = header.metadata.get("tokenizer.ggml.pre", "no label")
    expected, location = "the tokens of the merge's tokenizer", f"tokenizer.ggml.pre: {label}"
    checks.append(check_that(not problems, "tokens", seen, expected, location))
    return GgufChecks(checks=tuple(checks))


@value_stage("answers", version=1, subject="model")
def answer_with_gguf(model: QuantizedModel, serve: ServeSettings | None, tools: GgufTools) -> GgufChecks:
    """Let llama.cpp continue prompts and answer a chat with the template in the file, and check the answers.

    ``serve`` has the prompts. Without it, answers to standard prompts must be finite, but they may repeat themselves.
    """
    settings = serve or ServeSettings()
    facts = read_tokenizer_facts(model.source, settings.prompts)
    ends = {facts.eos, facts.chat.turn_ends[0] if facts.chat and facts.chat.turn_ends else None} - {None}
    choice = AnswerChoice(ends=tuple(sorted(end for end in ends if end is not None)))
    begin = (facts.bos,) if facts.adds_bos and facts.bos is not None else ()
    prompts = [begin + facts.ids[facts.texts.index(text)] for text in settings.prompts]
    try:
        with open_gguf(model.directory / model.weights, tools.python) as opened:
            answers, finite = [], True
            for prompt in prompts:
                room = len(prompt) + settings.max_tokens
                if opened.vocabulary.context_length:
                    room = max(len(prompt) + 1, min(room, opened.vocabulary.context_length))
                answers.append(opened.generate(prompt, choice, room - len(prompt), room=room))
                finite &= all(map(math.isfinite, opened.log_probabilities(prompt, answers[-1]).values))
            seen = f"{sum(map(len, answers))} tokens after {len(answers)} prompts"
            checks = [check_that(finite, "finite logprobs", seen, "finite numbers")]
            if serve is not None:
                loops = sum(map(is_loop, answers))
                seen = f"{loops} of {len(answers)} answers repeat one pattern"
                checks.append(check_that(2 * loops <= len(answers), "no loop", seen, "at most half of them"))
            if settings.chat is not False:
                checks += _chat_checks(opened, facts.chat, must_chat=bool(settings.chat), has_chatted=serve is not None)
    except InvalidInput as error:
        damage = Check.failed_check("answers", error.found, error.expected or "an answer", error.remedy, error.where)
        return GgufChecks(checks=(damage,))
    return GgufChecks(checks=tuple(checks))


def _chat_checks(llama: LlamaCpp, chat: Chat | None, *, must_chat: bool, has_chatted: bool) -> list[Check]:
    """Answer a chat with the template in the file, and compare the rendered prompt with that of the merge.

    ``has_chatted`` means that the merge answered a chat on its server. Otherwise, an empty answer may be its own.
    """
    if chat is None:
        seen = "the merge has no chat template"
        return [check_that(False, "chat", seen, "a template") if must_chat else Check.not_offered("chat", seen)]
    if chat.problem:
        return [check_that(False, "chat", chat.problem, "a template that renders")]
    answer = llama.chat(chat.messages, tokens=_ANSWER_TOKENS)
    ids = llama.tokenize([answer.prompt])[0]
    seen = f"{len(ids)} ids, " + ("which agree" if ids == chat.ids else f"which begin with {list(ids[:8])}")
    if not answer.text and not has_chatted:
        answered = Check.not_offered("chat", "an empty answer; the merge was not served, so its answer is unknown")
    else:
        answered = check_that(bool(answer.text), "chat", repr(answer.text[:40]), "some text")
    return [
        answered,
        check_that(ids == chat.ids, "chat prompt", seen, f"the {len(chat.ids)} ids of the merge's own template"),
    ]
