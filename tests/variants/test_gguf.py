"""GGUF files are converted, quantized, checked and answered with the real llama.cpp, on tiny random models."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gguf_samples import METADATA, TENSORS, gguf
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mergegate.flows.profile import load_profile, parse_profile
from mergegate.merge_core.checkpoint import GgufArray, GgufHeader, read_gguf_header
from mergegate.merge_core.checkpoint.gguf_file import _TENSOR_TYPES
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.base.stage import runtime, store
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.models.checkpoints import Model, QuantizedModel
from mergegate.tasks.models.llama_cpp import FILE_TYPES, measure_importance
from mergegate.tasks.quality.serve import Check, ServeSettings
from mergegate.tasks.quality.variants import ConversionCheck, VariantRecord, gguf_conversion
from mergegate.tasks.quality.variants.contract import CalibrationSettings
from mergegate.tasks.quality.variants.gguf import (
    GgufFormat,
    _chat_checks,
    answer_with_gguf,
    inspect_gguf,
    quantize_gguf,
)

torch.set_num_threads(1)

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = tuple(
    f"Paragraph {number}: in {1900 + number}, {number * 137} people read the {word}; it's theirs, they said.\n"
    for number, word in enumerate(("report on rivers", "code of law", "history of x + y", "list of words") * 6)
)
Rules = Literal["llama-bpe", "qwen2", "gpt-2", "pairs of letters", "words"]
Architecture = Literal["llama", "qwen2"]
Change = Callable[[Path], object]
RULES: Mapping[Architecture, Rules] = {"llama": "llama-bpe", "qwen2": "qwen2"}


def tokenizer(rules: Rules) -> PreTrainedTokenizerFast:
    """Train a small tokenizer with the splitting rules of a family, or with rules that llama.cpp does not have."""
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    if rules == "words":
        vocabulary = {word: number for number, word in enumerate([*special, "<unk>", "a", "b"])}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))
    backend = Tokenizer(models.BPE(ignore_merges=rules == "llama-bpe"))
    split = {
        "llama-bpe": LLAMA_3,
        "qwen2": LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"),
        "pairs of letters": r"\p{L}{1,2}|\P{L}{1,3}",
    }.get(rules)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level]) if split else byte_level
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = {"vocab_size": 700, "show_progress": False}
    trainer = trainers.BpeTrainer(**size, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([*gguf_conversion.SAMPLE_TEXTS, *TEXTS] * 3, trainer)
    if rules == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


def save_model(directory: Path, architecture: Architecture, rules: Rules, seed: int = 0) -> Model:
    """Save a random model in bfloat16 whose rows are divisible by 256, except those of the last projection."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        **{"vocab_size": 704, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1},
    }
    config = AutoConfig.for_model(architecture, **sizes, tie_word_embeddings=architecture == "qwen2")
    network: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # so that exchanged norms and lost biases show
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    network.to(torch.bfloat16).save_pretrained(directory)
    tokenizer(rules).save_pretrained(directory)
    return pinned(directory)


def pinned(directory: Path) -> Model:
    files = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return Model(name="merge", digest=digest, directory=directory, files=tuple(files.items()))


@dataclass(frozen=True)
class Converted:
    """A merge, its converted file, and a variant."""

    merge: Model
    tools: gguf_conversion.GgufTools
    artifact: Artifact[gguf_conversion.ConvertedGguf]
    variant: Artifact[VariantRecord]

    @property
    def file(self) -> Path:
        return self.artifact.directory / gguf_conversion.FILE

    @property
    def header(self) -> GgufHeader:
        return read_gguf_header(self.file)

    def compare(self, file: Path, texts: Sequence[str] = TEXTS) -> ConversionCheck:
        return gguf_conversion.compare_file(file, self.merge, texts, 0.01, self.tools, "cpu")

    def model(self, change: Change, directory: Path) -> QuantizedModel:
        """Return a copy of the variant with a change."""
        directory.mkdir(exist_ok=True)
        shutil.copy(self.variant.directory / self.variant.value.files[0], directory / "changed.gguf")
        change(directory / "changed.gguf")
        fields = {"name": "Q8_0", "digest": sha256_file(directory / "changed.gguf"), "directory": directory}
        return QuantizedModel(**fields, source=self.merge, backend="llama_cpp", weights="changed.gguf")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(autouse=True)
def home(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(state / "home"))


@pytest.fixture
def tools(gguf_python: Path) -> gguf_conversion.GgufTools:
    return gguf_conversion.GgufTools.find(gguf_python)


def converted(state: Path, architecture: Architecture, tools: gguf_conversion.GgufTools) -> Converted:
    """Return a converted model. Only the first call for a model converts it."""
    directory, rules = state / architecture, RULES[architecture]
    merge = pinned(directory) if directory.exists() else save_model(directory, architecture, rules)
    artifact = gguf_conversion.convert_merge.build(merge, "Tiny", tools)
    return Converted(merge, tools, artifact, quantize_gguf.build(merge, "Tiny", "Q8_0", tools))


@pytest.fixture
def llama(state: Path, tools: gguf_conversion.GgufTools) -> Converted:
    return converted(state, "llama", tools)


def problems(checks: Sequence[Check]) -> list[str]:
    return [check.name for check in checks if check.outcome == "fail"]


# Settings, without llama.cpp.


def variant(**settings: object) -> GgufFormat:
    profile = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}
    entry = {"format": "gguf", "types": ["Q8_0"], **settings}
    (parsed,) = parse_profile({**profile, "variants": [entry]}, "p").variants
    assert isinstance(parsed, GgufFormat)
    return parsed


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["Q4_KM"], r"'Q4_KM' is not a quantization type of llama\.cpp; did you mean 'Q4_K_M'\?"),
        (["q8_0"], r"'q8_0' is not a quantization type of llama\.cpp; did you mean 'Q8_0'\?"),
        (["IQ2_XS"], r"IQ2_XS needs calibration: \{documents: FILE\}"),
    ],
)
def test_an_unknown_type_is_refused_with_a_suggestion(types: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        variant(types=types)


@given(st.text(st.sampled_from("QIKFB0123468_MSLX"), min_size=1, max_size=8))
def test_exactly_the_names_of_llama_cpp_are_types(name: str) -> None:
    if name in FILE_TYPES:
        return
    with pytest.raises(InvalidInput, match="is not a quantization type"):
        variant(types=[name])


def test_a_missing_interpreter_is_reported_and_a_relative_one_is_relative_to_the_profile(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^llama.cpp: .*bin/python: no such file\n.*\n.*make gguf-env"):
        variant(python=str(tmp_path / "bin" / "python")).check(tmp_path)
    entry = {"format": "gguf", "types": ["Q8_0"], "python": "gguf/bin/python"}
    settings = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "x.jsonl"}, "variants": [entry]}
    (tmp_path / "p.yaml").write_text(json.dumps(settings))
    (parsed,) = load_profile(tmp_path / "p.yaml").variants
    assert parsed.python == tmp_path / "gguf" / "bin" / "python"


def test_a_few_different_texts_are_allowed_and_more_are_a_problem() -> None:
    texts = [f"text {number}" for number in range(200)]
    assert gguf_conversion.token_problems(texts[:2], (), texts, 0.01) == []
    assert "3 of 200 evaluated texts" in gguf_conversion.token_problems(texts[:3], (), texts, 0.01)[0]
    assert "1 of 3 tokens of the vocabulary" in gguf_conversion.token_problems(["b"], ["a", "b", "c"])[0]


@pytest.mark.parametrize("rule", gguf_conversion.SAMPLE)
def test_a_wrong_rule_for_splitting_text_is_always_a_problem(rule: str) -> None:
    assert "4 of 36 sample texts" in gguf_conversion.token_problems(gguf_conversion.SAMPLE[rule], ())[0]


# Conversion.


@pytest.mark.variants
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.proof)])
def test_a_converted_merge_agrees_with_the_merge(
    architecture: Architecture, state: Path, tools: gguf_conversion.GgufTools
) -> None:
    model = converted(state, architecture, tools)
    check = gguf_conversion.compare_conversion.build(model.merge, "Tiny", TEXTS, 0.0, tools, runtime()).value
    assert check.problems == ()
    assert check.different_texts == ()
    assert check.documents == len(TEXTS)
    assert check.mean_difference < 0.001 < gguf_conversion.LIMIT
    record = model.artifact.value
    assert (record.architecture, record.recognized, record.name) == (architecture, False, "Tiny")
    assert record.pre_tokenizer == RULES[architecture]
    assert {tensor.type for tensor in model.header.tensors} == {"F32"}
    assert model.header.metadata["general.name"] == "Tiny"


@pytest.mark.proof
@pytest.mark.variants
def test_the_same_merge_gives_the_same_bytes_from_any_directory(llama: Converted, tmp_path: Path) -> None:
    elsewhere = tmp_path / "Another-7B-Chat"
    shutil.copytree(llama.merge.directory, elsewhere)
    (elsewhere / "README.md").write_text("---\nlicense: mit\nlanguage: [de]\nbase_model: other/model\n---\n# Card\n")
    (elsewhere / "tokenization_evil.py").write_text("raise SystemExit('this file must not run')")
    (tmp_path / "out").mkdir()
    gguf_conversion.convert_merge.work(
        tmp_path / "out", llama.merge.model_copy(update={"directory": elsewhere}), "Tiny", llama.tools
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [gguf_conversion.FILE]
    assert (tmp_path / "out" / gguf_conversion.FILE).read_bytes() == llama.file.read_bytes()


def float_tensors(header: GgufHeader, change: Callable[..., None], *names: str) -> Change:
    """Return a change of tensors in a file with float32 weights."""
    by_name = {tensor.name: tensor for tensor in header.tensors}

    def apply(path: Path) -> None:
        content = np.memmap(path, dtype=np.uint8, mode="r+")
        places = [by_name[name] for name in names]
        views = [content[t.offset : t.offset + t.nbytes].view(np.float32).reshape(t.shape) for t in places]
        change(*views)
        content.flush()

    return apply


def metadata(key: str, number_format: str, value: float) -> Change:
    """Return a change of a number in the metadata."""

    def apply(path: Path) -> None:
        content = bytearray(path.read_bytes())
        start = content.index(key.encode()) + len(key) + 4  # after the type of the value
        struct.pack_into(number_format, content, start, value)
        path.write_bytes(content)

    return apply


def text_value(key: str, value: str | None) -> Change:
    """Return a change of a text in the metadata of a file. None renames the key, so that it is missing."""

    def apply(path: Path) -> None:
        header = read_gguf_header(path)
        content = path.read_bytes()
        start = content.index(struct.pack("<Q", len(key)) + key.encode()) + 8
        if value is None:
            path.write_bytes(content[:start] + b"x" + content[start + 1 :])
            return
        begin = start + len(key) + 4
        end = begin + 8 + struct.unpack_from("<Q", content, begin)[0]
        encoded = struct.pack("<Q", len(value.encode())) + value.encode()
        head = content[:begin] + encoded + content[end : header.table_end]
        path.write_bytes(head + bytes(-len(head) % 32) + content[header.data_offset :])

    return apply


def swap(first: Any, second: Any) -> None:
    first[:], second[:] = second.copy(), first.copy()


def exchange_heads(matrix: Any) -> None:
    matrix[:] = matrix.reshape(4, 64, -1)[[1, 0, 2, 3]].reshape(matrix.shape)


def interleave_rotation(matrix: Any) -> None:
    matrix[:] = matrix.reshape(4, 2, 32, -1).swapaxes(1, 2).reshape(matrix.shape)


def wrong_conversions(header: GgufHeader) -> Mapping[str, Change]:
    """Return conversions that load without complaint and compute another model."""
    architecture = header.metadata["general.architecture"]

    tensors = partial(float_tensors, header)
    changes = {
        "exchanged heads": tensors(exchange_heads, "blk.0.attn_q.weight"),
        "interleaved rotation": tensors(interleave_rotation, "blk.0.attn_q.weight"),
        "wrong rotation base": metadata(f"{architecture}.rope.freq_base", "<f", 10_500.0),
        "wrong norm epsilon": metadata(f"{architecture}.attention.layer_norm_rms_epsilon", "<f", 1e-3),
        "exchanged projections": tensors(swap, "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        "exchanged layers": tensors(swap, "blk.0.attn_v.weight", "blk.1.attn_v.weight"),
        "exchanged norms": tensors(swap, "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"),
        "norm with an offset of one": tensors(lambda norm: norm.__iadd__(1), "output_norm.weight"),
        "one scaled matrix": tensors(lambda matrix: matrix.__imul__(1.05), "blk.1.ffn_down.weight"),
    }
    names = {tensor.name for tensor in header.tensors}
    if "output.weight" in names:
        changes["lost head"] = tensors(swap, "output.weight", "token_embd.weight")
    if "blk.0.attn_q.bias" in names:
        biases = "blk.0.attn_k.bias", "blk.0.attn_v.bias"
        changes["lost biases"] = tensors(lambda key, value: (key.fill(0), value.fill(0)), *biases)
    return changes


@pytest.mark.proof
@pytest.mark.variants
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.proof)])
def test_every_wrong_conversion_disagrees_with_the_merge(
    architecture: Architecture, state: Path, tools: gguf_conversion.GgufTools, tmp_path: Path
) -> None:
    model = converted(state, architecture, tools)
    agreeing = {}
    for name, change in wrong_conversions(model.header).items():
        shutil.copy(model.file, tmp_path / gguf_conversion.FILE)
        change(tmp_path / gguf_conversion.FILE)
        check = model.compare(tmp_path / gguf_conversion.FILE)
        if not check.problems or "nats per document" not in check.problems[-1]:
            agreeing[name] = check.mean_difference
    assert agreeing == {}


@pytest.mark.variants
def test_nan_is_a_problem_and_has_a_finite_record(llama: Converted, tmp_path: Path) -> None:
    shutil.copy(llama.file, tmp_path / gguf_conversion.FILE)
    float_tensors(llama.header, lambda norm: norm.fill(np.nan), "output_norm.weight")(tmp_path / gguf_conversion.FILE)
    check = llama.compare(tmp_path / gguf_conversion.FILE)
    assert "likelihoods differ by nan nats" in check.problems[0]
    assert ConversionCheck.model_validate_json(check.model_dump_json()) == check


@pytest.mark.proof
@pytest.mark.variants
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (text_value("tokenizer.ggml.pre", "smollm"), "sample texts into other tokens"),
        (text_value("tokenizer.ggml.pre", "bloom"), "evaluated texts into other tokens"),
        (text_value("tokenizer.chat_template", None), "chat template: tokenizer.chat_template: no chat template"),
        (text_value("tokenizer.chat_template", "{{ messages }}"), "which differ from those of the merge"),
        (metadata("tokenizer.ggml.eos_token_id", "<I", 3), "end of text: tokenizer.ggml.eos_token_id: id 3"),
        (metadata("tokenizer.ggml.bos_token_id", "<I", 7), "begin of text: tokenizer.ggml.bos_token_id: id 7"),
        (metadata("tokenizer.ggml.add_bos_token", "<B", 0), "added tokens: adds no token"),
    ],
)
def test_a_wrong_tokenizer_is_found_before_and_after_quantizing(
    llama: Converted, tmp_path: Path, change: Change, found: str
) -> None:
    shutil.copy(llama.file, tmp_path / gguf_conversion.FILE)
    change(tmp_path / gguf_conversion.FILE)
    assert found in " ".join(llama.compare(tmp_path / gguf_conversion.FILE).problems)
    checks = inspect_gguf.build(llama.model(change, tmp_path / "quantized"), llama.tools).value.checks
    assert problems(checks)
    if "evaluated" not in found:
        assert found in " ".join(map(str, checks))


@pytest.mark.variants
@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ("words", r"tokenizer\.json: model\.type: WordLevel, which llama\.cpp does not support"),
        pytest.param(
            "pairs of letters",
            r"no rules that split text in the same way; the closest, .*, splits \d+ of \d+ texts",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_cannot_express_is_refused(
    rules: Rules, found: str, tools: gguf_conversion.GgufTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mergegate.tasks.quality.variants.gguf_conversion.known_labels", lambda tools: ["gpt-2", "qwen2"]
    )
    with pytest.raises(Refused, match=found):
        gguf_conversion.convert_merge.build(save_model(tmp_path / "model", "llama", rules), "Tiny", tools)


@pytest.mark.proof
@pytest.mark.variants
def test_an_unreadable_model_is_refused_in_one_line(tools: gguf_conversion.GgufTools, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", "gpt-2")
    written = (config := tmp_path / "model" / "config.json").read_text()
    causes = {"Glacier": "Model GlacierForCausalLM is not supported", "Gemma": "merge has no file tokenizer.model"}
    for name, found in causes.items():
        config.write_text(written.replace("LlamaForCausalLM", f"{name}ForCausalLM"))
        with pytest.raises(Refused) as refusal:
            gguf_conversion.convert_merge.build(pinned(tmp_path / "model"), "Tiny", tools)
        assert refusal.value.found.startswith(found)


# Quantization.


@pytest.mark.variants
@pytest.mark.parametrize("variant_type", sampled(["Q8_0", "Q4_K_M", "Q4_0", "BF16"], ("Q4_K_M",), pytest.mark.proof))
def test_quantizing_twice_gives_the_same_bytes(llama: Converted, tmp_path: Path, variant_type: str) -> None:
    artifact = quantize_gguf.build(llama.merge, "Tiny", variant_type, llama.tools)
    again = quantize_gguf.work(tmp_path, llama.merge, "Tiny", variant_type, llama.tools)
    assert again == artifact.value
    (name,) = again.files
    assert (tmp_path / name).read_bytes() == (artifact.directory / name).read_bytes()
    assert again.bytes == (tmp_path / name).stat().st_size < llama.file.stat().st_size
    assert sum(again.tensor_types.values()) == len(llama.header.tensors)


@pytest.mark.variants
def test_the_record_names_the_types_that_tensors_really_have(llama: Converted) -> None:
    record = quantize_gguf.build(llama.merge, "Tiny", "Q4_K_M", llama.tools).value
    # The rows of ffn_down have 288 elements, which is not divisible by 256.
    assert set(record.tensor_types) == {"F32", "Q4_K", "Q6_K", "Q5_0", "Q8_0"} & set(record.tensor_types)
    assert record.tensor_types.keys() & {"Q5_0", "Q8_0"}
    assert "Q4_K" in record.tensor_types


@pytest.mark.variants
def test_the_importance_of_an_input_is_its_mean_square(llama: Converted, tmp_path: Path) -> None:
    measure_importance(llama.file, TEXTS[:3], tmp_path / "a.npz", max_length=150, python=llama.tools.python)
    network: Any = AutoModelForCausalLM.from_pretrained(llama.merge.directory, dtype=torch.float32)
    tokens = PreTrainedTokenizerFast.from_pretrained(llama.merge.directory)
    inputs: list[torch.Tensor] = []
    network.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, given, _: inputs.append(given[0][0]))
    with torch.no_grad():
        for text in TEXTS[:3]:
            network(torch.tensor([tokens(text).input_ids[:150]]))
    expected = (torch.cat(inputs) ** 2).mean(dim=0)
    with np.load(tmp_path / "a.npz") as measured:
        assert sorted(measured.files) == sorted(
            tensor.name for tensor in llama.header.tensors if len(tensor.shape) == 2 and "embd" not in tensor.name
        )
        torch.testing.assert_close(torch.tensor(measured["blk.1.ffn_down.weight"]), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.proof
@pytest.mark.variants
def test_calibration_gives_other_weights_and_types_that_need_it(llama: Converted, tmp_path: Path) -> None:
    (tmp_path / "calibration.txt").write_text("\n\n".join(TEXTS))
    text = CalibrationSettings(documents=Path("calibration.txt"), samples=8)
    settings = GgufFormat(format="gguf", types=("IQ2_XS", "Q4_K_M"), calibration=text, python=llama.tools.python)
    calibration = settings.pin_calibration(tmp_path, store().hashes)
    assert calibration is not None
    for variant_type in settings.types:
        artifact = quantize_gguf.build(llama.merge, "Tiny", variant_type, llama.tools, calibration)
        assert artifact.value.calibration == calibration.text.sha256
        assert artifact.value.settings["importance matrix"] == "from 8 documents"
        assert set(artifact.files) == {f"model-{variant_type}.gguf", "value.json"}
    (tmp_path / "again").mkdir()
    quantize_gguf.work(tmp_path / "again", llama.merge, "Tiny", "Q4_K_M", llama.tools, calibration)
    calibrated = (tmp_path / "again" / "model-Q4_K_M.gguf").read_bytes()
    assert calibrated == (artifact.directory / "model-Q4_K_M.gguf").read_bytes()
    plain = quantize_gguf.build(llama.merge, "Tiny", "Q4_K_M", llama.tools)
    assert calibrated != (plain.directory / "model-Q4_K_M.gguf").read_bytes()


@pytest.mark.variants
def test_a_run_with_nothing_new_needs_neither_the_converted_file_nor_a_process(
    llama: Converted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = GgufFormat(format="gguf", types=("Q8_0",), name="Tiny", python=llama.tools.python)
    shutil.rmtree(llama.artifact.directory)
    monkeypatch.setattr("mergegate.tasks.base.sandbox.supervision.SupervisedProcess.__init__", pytest.fail)
    assert quantize_gguf.find(llama.merge, "Tiny", "Q8_0", llama.tools)
    files = settings.release_files("Demo", llama.variant)
    assert files == {"Demo-Q8_0.gguf": llama.variant.directory / "model-Q8_0.gguf"}


# Checks of the variant.


@pytest.mark.variants
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.proof)])
def test_a_good_variant_passes_all_checks(
    architecture: Architecture, state: Path, tools: gguf_conversion.GgufTools
) -> None:
    model = converted(state, architecture, tools)
    settings = GgufFormat(format="gguf", types=("Q8_0",), python=tools.python)
    opened = settings.open(model.merge, "Q8_0", model.variant)
    assert (opened.backend, opened.weights) == ("llama_cpp", "model-Q8_0.gguf")
    answered = answer_with_gguf.build(opened, None, tools).value.checks
    checks = (*inspect_gguf.build(opened, tools).value.checks, *answered)
    assert [check.outcome for check in checks] == ["pass"] * len(checks)
    assert [check.name for check in checks[-2:]] == ["chat", "chat prompt"]


@pytest.mark.variants
@pytest.mark.parametrize("seed", sampled(range(12), range(3), pytest.mark.proof))
def test_a_truncated_or_longer_file_is_always_refused(llama: Converted, tmp_path: Path, seed: int) -> None:
    content = (llama.variant.directory / llama.variant.value.files[0]).read_bytes()
    size = random.Random(seed).choice([*range(0, len(content), 997), len(content) - 1, len(content) + 1])
    model = llama.model(lambda path: path.write_bytes((content + b"\0")[:size]), tmp_path / "model")
    checks = inspect_gguf.work(model, llama.tools).checks
    assert problems(checks) == ["file"]
    assert "changed.gguf" in str(checks[0])


@pytest.mark.variants
def test_another_architecture_is_refused_with_llama_cpps_message(llama: Converted, tmp_path: Path) -> None:
    model = llama.model(text_value("general.architecture", "glacier"), tmp_path / "model")
    checks = inspect_gguf.build(model, llama.tools).value.checks
    assert "glacier" in str(next(check for check in checks if check.outcome == "fail"))


@pytest.mark.variants
def test_damaged_scales_are_noticed_when_the_variant_answers(llama: Converted, tmp_path: Path) -> None:
    header = read_gguf_header(llama.variant.directory / llama.variant.value.files[0])
    tensor = next(tensor for tensor in header.tensors if tensor.type == "Q8_0")

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[tensor.offset : tensor.offset + 2] = b"\x00\x7e"  # the scale of the first block is not a number
        path.write_bytes(content)

    checks = answer_with_gguf.build(llama.model(damage, tmp_path / "model"), None, llama.tools).value.checks
    assert "finite logprobs" in problems(checks) or "answers" in problems(checks)


@pytest.mark.variants
def test_a_required_chat_fails_without_a_template(llama: Converted, tmp_path: Path) -> None:
    shutil.copytree(llama.merge.directory, tmp_path / "merge")
    (tmp_path / "merge" / "chat_template.jinja").unlink()
    change = text_value("tokenizer.chat_template", None)
    model = llama.model(change, tmp_path / "model").model_copy(update={"source": pinned(tmp_path / "merge")})
    assert problems(inspect_gguf.build(model, llama.tools).value.checks) == []
    required = answer_with_gguf.build(model, ServeSettings(chat=True), llama.tools).value.checks
    assert "chat" in problems(required)
    optional = answer_with_gguf.build(model, ServeSettings(), llama.tools).value.checks
    assert {check.name: check.outcome for check in optional}["chat"] == "not offered"


@pytest.mark.parametrize(("has_chatted", "outcome"), [(True, "fail"), (False, "not offered")])
def test_an_empty_answer_fails_only_if_the_merge_is_known_to_chat(has_chatted: bool, outcome: str) -> None:
    llama: Any = SimpleNamespace(
        chat=lambda messages, tokens: SimpleNamespace(text="", prompt="hello"), tokenize=lambda texts: [(1, 2)]
    )
    chat: Any = SimpleNamespace(problem="", messages=(), ids=(1, 2))
    answered, prompted = _chat_checks(llama, chat, must_chat=False, has_chatted=has_chatted)
    assert (answered.outcome, prompted.outcome) == (outcome, "pass")


# mergegate's GGUF reader agrees with gguf-py, the reader of llama.cpp's converter.

READ = """
import json, sys
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
reader = GGUFReader(sys.argv[1])
fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
tensors = [
    [tensor.name, tensor.tensor_type.name, tensor.shape.tolist()[::-1], tensor.data_offset, tensor.n_bytes]
    for tensor in reader.tensors
]
types = {kind.value: [kind.name, *sizes] for kind, sizes in GGML_QUANT_SIZES.items()}
print(json.dumps([fields, tensors, types, reader.data_offset]))
"""
WRITE = """
import sys
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
writer = GGUFWriter(sys.argv[1], "llama")
writer.add_name("Tiny")
writer.add_block_count(1)
writer.add_token_list(["<s>", "a", "b"])
writer.add_token_types([3, 1, 1])
writer.add_token_scores([0.0, -1.5, 2.0])
writer.add_add_bos_token(False)
values = np.arange(4 * 256, dtype=np.float32).reshape(4, 256)
writer.add_tensor("norm", values[0, :7].copy())
for kind in ("BF16", "F16", "Q8_0", "Q4_0", "Q5_1", "TQ2_0", "MXFP4"):
    kind = GGMLQuantizationType[kind]
    writer.add_tensor(f"weight.{kind.name}", quants.quantize(values, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.mark.variants
@pytest.mark.parametrize("writer", ["gguf-py", "these tests"])
def test_both_readers_find_the_same_metadata_and_tensors(writer: str, tmp_path: Path, gguf_python: Path) -> None:
    path = tmp_path / "x.gguf"
    library = {"PYTHONPATH": str(gguf_python.parents[1] / "llama.cpp" / "gguf-py")}

    def run(program: str) -> str:
        return subprocess.check_output([gguf_python, "-c", program, path], env=library, text=True)

    if writer == "gguf-py":
        run(WRITE)
    else:
        path.write_bytes(gguf(METADATA, TENSORS))
    fields, tensors, types, data_offset = json.loads(run(READ))
    header = read_gguf_header(path)
    assert header.data_offset == data_offset
    assert [
        [*(getattr(tensor, name) for name in ("name", "type")), list(tensor.shape), tensor.offset, tensor.nbytes]
        for tensor in header.tensors
    ] == tensors
    assert header.metadata.keys() == fields.keys()
    for key, value in header.metadata.items():
        if isinstance(value, GgufArray):
            assert value.count == len(fields[key])
        else:
            assert value == fields[key]
    assert {int(code): tuple(entry) for code, entry in types.items()} == dict(_TENSOR_TYPES)
