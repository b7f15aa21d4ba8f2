"""Convert a merge to an unquantized GGUF file, and compare that file with the merge before anything is quantized.

llama.cpp's converter runs in the GGUF environment as a supervised process without network access. It reads links to the
files of the merge in a directory with a fixed name, without the model card and without Python files: the converter
derives metadata from names and cards, and a tokenizer may name Python files to run.

A GGUF file names the rules by which llama.cpp splits a text before it applies the merges of a BPE tokenizer: the
pre-tokenizer label. The converter looks it up by a hash of the ids of one text. One added token or merge can change
these ids although the rules stay the same. If the hash is unknown, :func:`convert_merge` tries the labels that the
converter knows. It takes the first one that gives the tokens of the merge's tokenizer for a sample of difficult texts
and for single tokens of the vocabulary.
"""

# ruff: noqa: RUF001  # The sample contains characters that look like others.

from __future__ import annotations

import math
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel

from mergegate.merge_core.checkpoint import GgufArray, GgufHeader, read_gguf_header
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import Refused
from mergegate.merge_core.parsing import read_json, read_text
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.base.sandbox import NotStarted, ProcessOptions, SupervisedProcess, compile_imports, output_tail
from mergegate.tasks.base.stage import Runtime, StageValue, memory_of_mapping_child, stage, value_stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import Model, TellProgress, call_model_process, child_environment, confinement
from mergegate.tasks.models.llama_cpp import (
    CONVERTER,
    LlamaCpp,
    environment_error,
    find_python,
    open_gguf,
    runtime_versions,
    toolchain,
)
from mergegate.tasks.quality.serve import Chat, Check, ReferenceRequest, make_reference, render_chat
from mergegate.tasks.quality.variants.contract import ConversionCheck

FILE = "model-F32.gguf"
# Largest mean difference of a document's log-likelihood that passes, in nats. Rounding in float32 makes a correct
# conversion differ: by 0.0014 for a real model with 135 M parameters and 30 layers, by less than 0.0001 for tiny ones.
# Wrong conversions of tiny models differ by 0.04 (a rotation base of 10,500 in place of 10,000) to 60
# (tests/variants/test_gguf.py).
LIMIT = 0.02
SCORED_TEXTS = 24  # compared documents, evenly spaced among the evaluated texts
SCORED_TOKENS = 256  # from the beginning of a document
_QUESTION = "What is the capital of France? Answer in one sentence."

# Texts on which pre-tokenizers differ, by the rule that they test. All are in Unicode's composed form: llama.cpp does
# not normalize text, so a decomposed letter differs for every model with a normalizer.
SAMPLE: Mapping[str, tuple[str, ...]] = {
    "digits": (
        "3 33 333 3333 33333 333333 3333333",
        "In 1989, 12,345,678 people paid $3.14159 or 100%.",
        "x1 = 20 + 300; y22 = 4000e-5",
        "2024-11-05T16:45:00Z v1.10.2 127.0.0.1:8080",
    ),
    "spaces": (
        "two  spaces   and    four",
        "  leading spaces and trailing ones   ",
        "tabs\tand\t\ttwo tabs",
        " \n  \n   indented\n    lines\n",
    ),
    "line breaks": (
        "one\ntwo\n\nthree\n\n\nfour",
        "Windows\r\nline\r\n\r\nbreaks",
        "A sentence.\n\nA paragraph.\n",
        "- a list\n- of items\n\n\n",
    ),
    "contractions": (
        "I'm sure they've said it's what we'd do; you'll see, don't worry.",
        "I'M SURE THEY'VE SAID IT'S WHAT WE'D DO",
        "the dogs' bowl, rock 'n' roll, o'clock, 'quoted'",
        "It's John's; We\u2019ve typed it.",
    ),
    "case": (
        "HTMLParser getElementById snake_case CONSTANT_NAME",
        "iPhone eBay McDonald NASA PhD",
        "THE QUICK brown Fox JUMPS",
        "a B c D eF Gh",
    ),
    "punctuation": (
        'Wait... what?! No -- really: (yes), [no], {maybe}; "ok".',
        "------======= ****** ////// ......",
        "user@example.com https://example.com/a?b=c&d=e#f",
        "#hashtag @mention 50% off! <tag/> a/b\\c",
    ),
    "code": (
        "def f(x):\n    return x**2  # square\n",
        "for (int i = 0; i < n; ++i) { sum += a[i]; }",
        "SELECT * FROM t WHERE id >= 10 AND name != 'x';",
        "\tif err != nil {\n\t\treturn err\n\t}\n",
    ),
    "scripts": (
        "Über naïve Straßen, El Niño, façade, Dvořák",
        "Быстрая лиса, что-то на русском языке",
        "我想在苹果公司工作1314151天，今天天气很好。",
        "日本語の文章と カタカナ。 한국어 문장입니다. ภาษาไทย हिन्दी العربية",
    ),
    "symbols": (
        "🚀 rocket 🦙🦙 ✅ done 👩‍💻",
        "∑ x² ≤ ∞, α→β, 5 × 7 ÷ 2 ± 1",
        "“quotes” ‘single’ – dash — em… €5 £6 ¥7 ½",
        "zero\u200bwidth non\u00a0breaking ™ © ®",
    ),
}
SAMPLE_TEXTS = tuple(text for texts in SAMPLE.values() for text in texts)
# Largest share of the sample that may be split differently. Each of the nine rules has four texts, so a wrong rule
# exceeds it.
SAMPLE_LIMIT = 0.06
PROBES = 128  # single tokens of the vocabulary that are split, too
# Labels by a part of the pre-tokenizer in tokenizer.json that is typical of them. They are tried first, because a small
# vocabulary gives equal tokens with several labels.
TYPICAL_LABELS = (
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|", "llama-bpe"),
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", "qwen2"),
    ("{'type': 'Digits', 'individual_digits': True}", "smollm"),
    ("{'type': 'ByteLevel'", "gpt-2"),
)
# Labels that are tried next, one for each frequent set of rules.
FREQUENT_LABELS = (
    *("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-v3", "deepseek-llm", "starcoder"),
    *("command-r", "falcon", "mpt", "olmo", "stablelm2", "qwen35", "glm4", "refact", "bloom", "superbpe"),
)

_UNKNOWN_PRE_TOKENIZER = 3  # exit code of the wrapper
_PLACEHOLDER = "default"
# Runs the converter, and writes a placeholder if it does not know the pre-tokenizer.
_WRAPPER = f"""
import pathlib, runpy, sys
script, directory, output, name = sys.argv[1:]
root = pathlib.Path(script).parent
sys.path[:0] = [str(root), str(root / "gguf-py")]
from conversion.base import TextModel

look_up, is_known = TextModel.get_vocab_base_pre, True

def pre_tokenizer_label(self, tokenizer):
    global is_known
    try:
        return look_up(self, tokenizer)
    except NotImplementedError:
        is_known = False
        return {_PLACEHOLDER!r}

TextModel.get_vocab_base_pre = pre_tokenizer_label
sys.argv = [script, directory, "--outtype", "f32", "--outfile", output, "--model-name", name]
runpy.run_path(script, run_name="__main__")
sys.exit(0 if is_known else {_UNKNOWN_PRE_TOKENIZER})
"""
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_CAUSE = re.compile(r"^(?:ERROR:[\w.-]+:|\w+(?:Error|Exception): ?)(?P<cause>.*\S.*)$", re.MULTILINE)
_PRE = "tokenizer.ggml.pre"


class GgufTools(BaseModel, frozen=True, extra="forbid"):
    """Interpreter of the GGUF environment, and the versions and settings of llama.cpp that determine its results."""

    python: Annotated[Path, NotInKey]  # absolute
    versions: dict[str, str]  # of llama-cpp-python, the converter, and the settings of the runtime

    @classmethod
    def find(cls, python: Path | None) -> GgufTools:
        """Return the tools in the environment of ``python``, by default that of ``make gguf-env``."""
        return cls(python=find_python(python), versions=toolchain(python) | runtime_versions(python))

    @property
    def converter(self) -> Path:
        """Path of the converter, next to its packages."""
        return self.python.parent.parent / CONVERTER


class ConvertedGguf(StageValue):
    """The merge as an unquantized GGUF file (``FILE``), with float32 weights."""

    name: str  # ``general.name`` in the file
    architecture: str  # 'llama'
    pre_tokenizer: str  # label of the splitting rules; empty if the tokenizer has none
    recognized: bool  # whether the converter knows the tokenizer; else the label follows from equal tokens
    tensors: int
    bytes: int

    def summary(self) -> str:
        rules = f", pre-tokenizer {self.pre_tokenizer}" if self.pre_tokenizer else ""
        return f"{self.architecture}, {self.tensors} tensors, {format_bytes(self.bytes)}{rules}"


@stage("convert", version=1, subject="merge")
def convert_merge(out: Path, merge: Model, name: str, tools: GgufTools) -> ConvertedGguf:
    """Convert ``merge`` to a GGUF file with float32 weights. ``name`` is the name of the model in the file.

    Raises:
        Refused: The converter does not know the architecture, or llama.cpp cannot split text as the tokenizer does.
    """
    _require_known_tokenizer(merge)
    links, file = out / "model", out / FILE
    for source in merge.present() if not merge.files else map(merge.directory.joinpath, dict(merge.files)):
        if source.suffix != ".py":
            link = links / source.relative_to(merge.directory)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    recognized = _run_converter(merge, links, file, name, tools)
    shutil.rmtree(links)
    if not recognized:
        relabeled = out / "relabeled.gguf"
        _relabel(file, relabeled, find_pre_tokenizer(merge, file, tools), with_weights=True)
        relabeled.replace(file)
    header = read_gguf_header(file)
    return ConvertedGguf(
        name=name,
        architecture=str(header.metadata["general.architecture"]),
        pre_tokenizer=str(header.metadata.get(_PRE, "")),
        recognized=recognized,
        tensors=len(header.tensors),
        bytes=file.stat().st_size,
    )


def _require_known_tokenizer(merge: Model) -> None:
    """Raise Refused if the model of the tokenizer is of a type that GGUF files cannot express."""
    path = merge.tokenizer_directory / "tokenizer.json"
    if not path.is_file():
        return  # SentencePiece
    model = read_json(path, bounds=TOKENIZER_BOUNDS).get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "WordLevel":
        raise Refused(
            f"{path}: model.type",
            found="WordLevel, which llama.cpp does not support",
            expected="a BPE, Unigram or WordPiece tokenizer",
            remedy="remove the entry 'format: gguf' from 'variants', or use parents with another tokenizer",
        )


def _run_converter(merge: Model, directory: Path, output: Path, name: str, tools: GgufTools) -> bool:
    """Convert the model in ``directory``. Return whether the converter knows its pre-tokenizer."""
    environment = child_environment() | _QUIET
    script = tools.converter
    imports = f"import sys; sys.path[:0] = [{str(script.parent)!r}, {str(script.parent / 'gguf-py')!r}]; "
    compile_imports(
        tools.python,
        imports + "import torch, transformers, conversion.base",
        script.parent / "conversion/base.py",
        environment,
    )
    limit = memory_of_mapping_child()
    with tempfile.TemporaryFile() as log:
        try:
            process = SupervisedProcess(
                [str(tools.python), "-P", "-c", _WRAPPER, str(script), str(directory), str(output), name],
                environment,
                log,
                ProcessOptions(
                    "convert", confinement=confinement(merge, script.parent, write=output.parent, memory=limit)
                ),
            )
        except NotStarted as error:
            raise environment_error(f"{tools.python}: {error}") from None
        end = process.wait()
        if end.returncode in (0, _UNKNOWN_PRE_TOKENIZER) and output.is_file():
            return end.returncode == 0
        text = output_tail(log)
    causes = [match["cause"].strip() for match in _CAUSE.finditer(text)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if causes and causes[-1].startswith("File not found: ") and not (directory / "tokenizer.model").exists():
        raise Refused(
            "llama.cpp's converter",
            found=f"{merge.name} has no file tokenizer.model, which the converter needs for this family",
            expected="the SentencePiece vocabulary of the family, next to tokenizer.json",
            remedy="copy tokenizer.model of the base into the directory of the parent whose tokenizer is used",
        )
    raise Refused(
        "llama.cpp's converter",
        found=(causes or lines or [str(end)])[-1][:300],
        expected="an architecture and a tokenizer that llama.cpp supports",
        remedy="remove the entry 'format: gguf' from 'variants', or install a newer llama.cpp",
    )


def find_pre_tokenizer(merge: Model, gguf_file: Path, tools: GgufTools) -> str:
    """Return the first label with which llama.cpp splits the sample and the probes as the tokenizer of ``merge`` does.

    ``gguf_file`` is a GGUF file of the merge with any label.
    """
    facts = read_tokenizer_facts(merge, SAMPLE_TEXTS)
    known = known_labels(tools)
    path = merge.tokenizer_directory / "tokenizer.json"
    rules = (
        str(read_json(path, bounds=TOKENIZER_BOUNDS).get("pre_tokenizer")).replace("\\\\", "\\")
        if path.is_file()
        else ""
    )
    typical = (label for part, label in TYPICAL_LABELS if part in rules)
    labels = [*(label for label in (*typical, *FREQUENT_LABELS) if label in known), *known]
    best, fewest = "", None
    relabeled = gguf_file.with_name("relabeled.gguf")
    for label in dict.fromkeys(labels):
        _relabel(gguf_file, relabeled, label, with_weights=False)
        with open_gguf(relabeled, tools.python, vocabulary_only=True) as model:
            different = different_texts(facts, model)
        if fewest is None or len(different) < len(fewest):
            best, fewest = label, different
        if not different:
            break
    relabeled.unlink(missing_ok=True)
    if fewest:
        quoted = ", ".join(repr(text[:30]) for text in fewest[:3])
        raise Refused(
            f"{merge.tokenizer_directory / 'tokenizer.json'}: pre_tokenizer",
            found=f"llama.cpp has no rules that split text in the same way; the closest, {best!r}, splits "
            f"{len(fewest)} of {len(facts.texts)} texts differently: {quoted}",
            expected="rules that llama.cpp knows",
            remedy="use the tokenizer of a parent, or remove the entry 'format: gguf' from 'variants'",
        )
    return best


def known_labels(tools: GgufTools) -> list[str]:
    """Return all pre-tokenizer labels that the converter knows, in the order of its source."""
    source = read_text(tools.converter.parent / "conversion" / "base.py", 16 << 20)
    return re.findall(r'^ +res = "([^"]+)"$', source, re.MULTILINE)


def _relabel(source: Path, destination: Path, label: str, *, with_weights: bool) -> None:
    """Copy a GGUF file with another pre-tokenizer label. Without weights, the copy is only good for its vocabulary."""
    header = read_gguf_header(source)
    alignment = header.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # read_gguf_header checks it
    key = _encoded(_PRE) + (8).to_bytes(4, "little")  # 8: the type of a text
    with source.open("rb") as file, destination.open("wb") as copy:
        content = file.read(header.table_end)
        start = content.index(key) + len(key)
        end = start + 8 + int.from_bytes(content[start : start + 8], "little")
        copy.write(content[:start] + _encoded(label) + content[end:])
        copy.write(bytes(-copy.tell() % alignment))
        if with_weights:
            file.seek(header.data_offset)
            shutil.copyfileobj(file, copy, 1 << 24)
        else:
            copy.truncate(copy.tell() + source.stat().st_size - header.data_offset)


def _encoded(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


class TokenizerFacts(NamedTuple):
    """Properties of the merge's tokenizer that a GGUF file must have.

    ``texts`` and ``ids`` are texts, including ``probes``, and their token ids, without tokens that the tokenizer adds.
    ``probes`` are single tokens of the vocabulary as text.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    probes: tuple[str, ...]
    bos: int | None
    eos: int | None
    adds_bos: bool  # whether the tokenizer puts ``bos`` before a text
    adds_eos: bool
    size: int  # one more than the largest id
    chat_template: str  # empty if there is none
    chat: Chat | None  # the question of a user, rendered with the template


def read_tokenizer_facts(merge: Model, texts: Sequence[str]) -> TokenizerFacts:
    """Split ``texts`` and probes of the vocabulary with the merge's tokenizer, in the model process."""
    location = f"{merge.name}: its tokenizer"
    return call_model_process(_tokenizer_facts, (merge, tuple(texts)), location=location)


def _tokenizer_facts(merge: Model, texts: tuple[str, ...], on_progress: TellProgress) -> TokenizerFacts:
    import transformers

    loader: Any = transformers.AutoTokenizer
    tokenizer: Any = loader.from_pretrained(
        merge.tokenizer_directory, local_files_only=True, trust_remote_code=merge.runs_code
    )
    size = max(tokenizer.get_vocab().values()) + 1
    special = set(tokenizer.added_tokens_decoder)
    numbers = [number for number in range(0, size, max(1, size // PROBES)) if number not in special]
    decoded = [tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in numbers]
    probes = tuple(dict.fromkeys(text for text in decoded if text and "\ufffd" not in text))
    texts = tuple(dict.fromkeys((*texts, *probes)))
    with_added = [int(number) for number in tokenizer("a")["input_ids"]]
    return TokenizerFacts(
        texts,
        tuple(tuple(map(int, tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts),
        probes,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        adds_bos=tokenizer.bos_token_id is not None and with_added[0] == tokenizer.bos_token_id,
        adds_eos=tokenizer.eos_token_id is not None and with_added[-1] == tokenizer.eos_token_id,
        size=size,
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else "",
        chat=render_chat(tokenizer, _QUESTION),
    )


@value_stage("agreement", version=1, subject="merge")
def compare_conversion(
    merge: Model,
    name: str,
    texts: tuple[str, ...],
    max_different_texts: float,
    tools: GgufTools,
    runtime: Runtime,
) -> ConversionCheck:
    """Compare tokens and likelihoods of ``texts`` under the converted file in llama.cpp with those of ``merge``.

    ``name`` is the name of the model in the file. transformers computes in float32. ``max_different_texts`` is the
    largest share of the texts that llama.cpp may split differently.
    """
    file = convert_merge.build(merge, name, tools).directory / FILE
    return compare_file(file, merge, texts, max_different_texts, tools, runtime.device)


def compare_file(
    file: Path, merge: Model, texts: Sequence[str], max_different_texts: float, tools: GgufTools, device: str
) -> ConversionCheck:
    """Compare a GGUF file with float32 weights with ``merge``, as :func:`compare_conversion` does.

    ``device`` is the device on which transformers computes.
    """
    facts = read_tokenizer_facts(merge, (*texts, *SAMPLE_TEXTS))
    scored = tuple(texts)[:: max(1, len(texts) // SCORED_TEXTS)][:SCORED_TEXTS] or SAMPLE_TEXTS[:SCORED_TEXTS]
    request = ReferenceRequest(scored, _QUESTION, "float32", device, SCORED_TOKENS + 1)
    location = f"{merge.name}: reference for its GGUF file"
    reference = call_model_process(make_reference, (merge, request), location=location, models=[merge]).texts
    with open_gguf(file, tools.python) as model:
        different = different_texts(facts, model)
        checks = [*header_checks(read_gguf_header(file), facts), vocabulary_check(model, facts)]
        likelihoods = [model.log_probabilities(text.ids[:1], text.ids[1:]).values for text in reference]
    differences = [
        abs(math.fsum(theirs) - math.fsum(text.logprobs)) for theirs, text in zip(likelihoods, reference, strict=True)
    ]
    mean = fmean(differences) if differences else 0.0
    problems = [str(check) for check in checks if check.outcome == "fail"]
    problems += token_problems(different, facts.probes, texts, max_different_texts)
    if not mean <= LIMIT:  # also if it is not a number
        problems.append(
            f"likelihoods differ by {mean:.4g} nats per document, and {LIMIT:g} are allowed: the converter does not "
            "express this model correctly"
        )
    finite = [value for value in differences if math.isfinite(value)]
    return ConversionCheck(
        documents=len(differences),
        mean_difference=mean if math.isfinite(mean) else sys.float_info.max,
        max_difference=max(finite, default=0.0) if len(finite) == len(differences) else sys.float_info.max,
        limit=LIMIT,
        texts=len(facts.texts),
        different_texts=tuple(text[:80] for text in different),
        problems=tuple(problems),
    )


def token_problems(
    different: Collection[str], probes: Collection[str], texts: Collection[str] = (), max_different_texts: float = 0.0
) -> list[str]:
    """Return a sentence for each set of texts that llama.cpp does not split correctly.

    The sets are the evaluated ``texts``, the sample, and the ``probes`` of the vocabulary. ``different`` contains the
    texts that it splits differently.
    """
    sets = (
        ("evaluated texts", texts, max_different_texts),
        ("sample texts", SAMPLE_TEXTS, SAMPLE_LIMIT),
        ("tokens of the vocabulary", probes, SAMPLE_LIMIT),
    )
    problems = []
    for what, members, limit in sets:
        wrong = [text for text in dict.fromkeys(members) if text in different]
        if len(wrong) > limit * len(set(members)):
            quoted = ", ".join(repr(text[:30]) for text in wrong[:3])
            problems.append(
                f"llama.cpp splits {len(wrong)} of {len(set(members))} {what} into other tokens than the merge's "
                f"tokenizer, and {limit:.1%} are allowed: {quoted}"
            )
    return problems


def header_checks(header: GgufHeader, facts: TokenizerFacts) -> list[Check]:
    """Check that a GGUF file repeats the vocabulary size, the special tokens and the chat template of the merge."""
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = tokens.count if isinstance(tokens, GgufArray) else 0
    checks = [check_that(count >= facts.size, "vocabulary", f"{count:,} tokens", f"at least {facts.size:,} tokens")]
    for name, key, ours in (
        ("begin of text", "tokenizer.ggml.bos_token_id", facts.bos),
        ("end of text", "tokenizer.ggml.eos_token_id", facts.eos),
    ):
        if ours is not None:
            seen = f"id {metadata[key]}" if key in metadata else "no id"
            checks.append(
                check_that(metadata.get(key) == ours, name, seen, f"id {ours}, as in the merge's tokenizer", key)
            )
    key = "tokenizer.chat_template"
    template = metadata.get(key, "")
    seen = f"{len(str(template)):,} characters" if template else "no chat template"
    seen += ", which differ from those of the merge" if template and template != facts.chat_template else ""
    expected = f"the {len(facts.chat_template):,} characters of the merge's" if facts.chat_template else "none"
    checks.append(check_that(template == facts.chat_template, "chat template", seen, expected, key))
    return checks


def vocabulary_check(model: LlamaCpp, facts: TokenizerFacts) -> Check:
    """Check that llama.cpp adds the same special tokens to a text as the merge's tokenizer."""

    def describe(begin: bool, end: bool) -> str:
        names = [name for name, is_added in (("begin of text", begin), ("end of text", end)) if is_added]
        return f"adds {' and '.join(names) or 'no token'}"

    vocabulary = model.vocabulary
    theirs, ours = (vocabulary.adds_bos, vocabulary.adds_eos), (facts.adds_bos, facts.adds_eos)
    return check_that(theirs == ours, "added tokens", describe(*theirs), f"{describe(*ours)}, as the merge's tokenizer")


def different_texts(facts: TokenizerFacts, model: LlamaCpp) -> tuple[str, ...]:
    """Return the texts that llama.cpp splits into other tokens than the merge's tokenizer."""
    ids = model.tokenize(facts.texts)
    return tuple(text for text, ours, theirs in zip(facts.texts, facts.ids, ids, strict=True) if ours != theirs)


def check_that(passed: bool, name: str, observation: str, expected: str, location: str = "") -> Check:
    """Return a check with the outcome ``passed``."""
    if passed:
        return Check.passed_check(name, observation, expected)
    return Check.failed_check(name, observation, expected, "build the variant again, with a newer llama.cpp", location)
