"""llama.cpp scores and generates as transformers does in float32, and each result depends on its own request only."""

from __future__ import annotations

import math
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from samples import sampled
from tiny_models import CPU, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mergegate.merge_core.checkpoint import read_gguf_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo, sha256_file
from mergegate.merge_core.files.records import JournalLocation, open_journal
from mergegate.tasks.models.checkpoints import Model, QuantizedModel, end_model_process, load_model
from mergegate.tasks.models.llama_cpp import (
    BACKEND_NAME,
    FILE_TYPES,
    AnswerChoice,
    LlamaCpp,
    close_gguf,
    open_gguf,
    quantize,
    runtime_versions,
    toolchain,
)
from mergegate.tasks.quality.evaluation import Scoring, find_backend
from mergegate.tasks.quality.evaluation.scoring.answer_journal import attach_journal
from mergegate.tasks.quality.perplexity.measurement import WindowSettings
from mergegate.tasks.quality.perplexity.settings import PerplexitySettings
from mergegate.tasks.quality.perplexity.stage import perplexity, pin_documents, read_documents

Family = Literal["llama", "qwen2"]
PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "LICENSE").read_text()
TEXTS = [" ".join(TEXT.split()[start : start + 14]) for start in range(0, 560, 14)]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The converter knows published tokenizers by a hash, so the label of the pre-tokenizer is given here.
_CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for directory in sys.argv[2:]:
    sys.argv = ["convert", directory, "--outtype", "f32", "--outfile", directory + ".gguf"]
    runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""
pytestmark = pytest.mark.variants
FLOAT32 = Scoring(dtype="float32", batch_size=4)
FAMILIES: tuple[Family, ...] = ("llama", "qwen2")
# An unquantized file, and types whose weights llama.cpp stores in another order for faster sums.
TYPES = ("F32", "Q8_0", "Q4_0", "Q4_K_M")
LENGTHS = (1, 5, 31, 32, 33, 64, 100, 200, 300)  # around the size of a batch and that of the smallest cache


def make_checkpoint(directory: Path, family: Family) -> Model:
    """Save a random two-layer network in float32. Its rows are divisible by 256, as K-quants require."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[2], pad_token=special[0]
    )
    fast.chat_template = CHAT
    torch.manual_seed(3)
    # The range is larger than the default, so that answers differ clearly.
    sizes = {"vocab_size": len(fast), "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(directory)
    fast.save_pretrained(directory)
    return Model(name=directory.name, digest=sha256_file(directory / "model.safetensors"), directory=directory)


def convert_checkpoints(directories: list[Path], python: Path) -> None:
    """Convert each directory to ``directory.gguf`` in F32, with llama.cpp's own converter."""
    converter = PROJECT / ".venv-gguf" / "llama.cpp"
    command = [str(python), "-c", _CONVERT, str(converter), *map(str, directories)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def as_variant(file: Path, source: Model) -> QuantizedModel:
    """Describe a GGUF file as ``GgufFormat.open`` does."""
    digest = sha256_file(file)
    fields = {"name": file.name, "digest": digest, "directory": file.parent, "files": ((file.name, digest),)}
    fields |= {"python": PROJECT / ".venv-gguf" / "bin" / "python"}
    runtime = tuple(sorted(runtime_versions().items()))
    return QuantizedModel(**fields, source=source, backend=BACKEND_NAME, weights=file.name, runtime=runtime)


@pytest.fixture(scope="session")
def checkpoints(gguf_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Model]:
    directory = tmp_path_factory.mktemp("checkpoints")
    made: dict[Family, Model] = {family: make_checkpoint(directory / family, family) for family in FAMILIES}
    convert_checkpoints([model.directory for model in made.values()], gguf_python)
    for file_type in TYPES[1:]:
        quantize(directory / "llama.gguf", directory / f"llama-{file_type}.gguf", file_type)
    return made


@pytest.fixture(scope="session")
def llama(checkpoints: dict[Family, Model]) -> Model:
    return checkpoints["llama"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    close_gguf()


def gguf_of(model: Model, file_type: str = "F32") -> Path:
    suffix = "" if file_type == "F32" else f"-{file_type}"
    return model.directory.with_name(f"{model.directory.name}{suffix}.gguf")


def reference(model: Model) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float64)


def reference_log_probabilities(network: Any, context: list[int], continuation: list[int]) -> list[float]:
    with torch.no_grad():
        logits = network(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist()


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(600) for _ in range(count)]


@pytest.mark.proof
@pytest.mark.parametrize("family", sampled(FAMILIES, ("llama",), pytest.mark.proof))
def test_log_probabilities_equal_a_reference_in_float64(checkpoints: dict[Family, Model], family: Family) -> None:
    rng, network = random.Random(0), reference(checkpoints[family])
    with open_gguf(gguf_of(checkpoints[family])) as model:
        for length in LENGTHS:
            context, continuation = random_tokens(rng, length), random_tokens(rng, rng.choice((1, 2, 33, 70)))
            wanted = reference_log_probabilities(network, context, continuation)
            assert model.log_probabilities(context, continuation).values == pytest.approx(wanted, abs=1e-4)


def test_a_continuation_is_greedy_if_it_consists_of_the_most_probable_tokens(llama: Model) -> None:
    with open_gguf(gguf_of(llama)) as model:
        answer = model.generate([5, 6, 7], AnswerChoice(), 8, room=16)
        assert model.log_probabilities([5, 6, 7], answer).greedy
        for position in range(8):
            other = [*answer[:position], (answer[position] + 1) % 600]
            assert not model.log_probabilities([5, 6, 7], other).greedy


Request = Callable[[LlamaCpp], object]


def requests(rng: random.Random) -> list[Request]:
    """Return requests with common beginnings: equal contexts, contexts that extend others, and answers in steps."""
    contexts = [random_tokens(rng, length) for length in rng.sample(LENGTHS, 3)]
    contexts += [[*context[: rng.randint(1, len(context))], *random_tokens(rng, 20)] for context in contexts]
    made: list[Request] = []
    for context in contexts:
        for count in (1, 6, 40):
            continuation = random_tokens(rng, count)
            made.append(lambda model, c=context, t=continuation: model.log_probabilities(c, t))  # type: ignore[misc]
        room = len(context) + 12
        made.append(lambda model, c=context, r=room: model.generate(c, AnswerChoice(), 12, room=r))  # type: ignore[misc]
    return made


@pytest.mark.proof
@pytest.mark.parametrize("file_type", sampled(TYPES, ("Q4_K_M",), pytest.mark.proof))
def test_a_result_depends_on_its_own_request_only(llama: Model, file_type: str) -> None:
    rng = random.Random(file_type)
    asked = requests(rng)
    path = gguf_of(llama, file_type)
    with open_gguf(path) as model:
        together = [request(model) for request in asked]
        for _ in range(4):
            order = rng.choices(range(len(asked)), k=2 * len(asked))  # with repetitions
            assert [asked[number](model) for number in order] == [together[number] for number in order]
    for number in rng.sample(range(len(asked)), 6):
        with open_gguf(path) as model:
            assert asked[number](model) == together[number]


def test_an_answer_in_steps_equals_an_answer_at_once(llama: Model) -> None:
    rng = random.Random(1)
    with open_gguf(gguf_of(llama, "Q4_0")) as model:
        for choice in (AnswerChoice(), AnswerChoice(temperature=1.0, seed=3), AnswerChoice(repetition_penalty=1.3)):
            prompt = random_tokens(rng, 70)
            whole = model.generate(prompt, choice, 40, room=110)
            answer: tuple[int, ...] = ()
            while len(answer) < 40:
                answer += model.generate(prompt, choice, 7 if len(answer) < 35 else 5, room=110, answer=answer)
                model.log_probabilities(random_tokens(rng, 40), [1, 2])  # another request in between
            assert answer == whole


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_answers_are_those_of_transformers(llama: Model, penalty: float) -> None:
    rng, network = random.Random(2), reference(llama)
    with open_gguf(gguf_of(llama)) as model:
        for _ in range(5):
            prompt = random_tokens(rng, 20)
            settings = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": penalty, "eos_token_id": 2}
            settings |= {"attention_mask": torch.ones((1, 20), dtype=torch.long), "pad_token_id": 0}
            with torch.no_grad():
                wanted = network.generate(torch.tensor([prompt]), **settings)[0, 20:].tolist()
            choice = AnswerChoice(ends=(2,), repetition_penalty=penalty)
            assert list(model.generate(prompt, choice, 24, room=44)) == wanted


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.2}], ids=lambda each: str(each)
)
def test_random_tokens_have_the_probabilities_of_transformers(llama: Model, settings: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    network, prompt, draws = reference(llama), [7, 8, 9], 400
    network.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    report = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        scores = network.generate(torch.tensor([prompt]), **report, **settings).scores[0][0]
    probabilities = scores.softmax(0).numpy()
    choices = [AnswerChoice(seed=seed, **{"temperature": 1.0, **settings}) for seed in range(draws)]
    with open_gguf(gguf_of(llama)) as model:
        drawn = Counter(model.generate(prompt, choice, 1, room=4)[0] for choice in choices)
    assert all(probabilities[token] > 0 for token in drawn)
    for token in np.argsort(-probabilities)[:5]:
        expected = draws * probabilities[token]
        assert abs(drawn[int(token)] - expected) <= 4 * math.sqrt(max(expected, 1)) + 1


@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_the_tokenizer(llama: Model, special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama.directory)
    texts = [*TEXTS, "<|im_start|>user\nHi<|im_end|>", "  two   spaces\n\n\tand a tab 3.14", "Ünïcödé 北京 🙂"]
    plain = {"add_special_tokens": False, "split_special_tokens": not special}
    wanted = [tuple(tokenizer(text, **plain).input_ids) for text in texts]
    with open_gguf(gguf_of(llama), vocabulary_only=True) as model:
        assert model.tokenize(texts, special=special) == wanted
        assert model.vocabulary.tokens == {"bos": 0, "eos": 2, "eot": 2, "pad": 0, "sep": None, "nl": wanted and 201}
        assert model.vocabulary.vocabulary_size == len(tokenizer)


def test_a_chat_has_the_prompt_of_the_template_in_the_file(llama: Model, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is a license?"}]
    tokenizer = AutoTokenizer.from_pretrained(llama.directory)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with open_gguf(gguf_of(llama)) as model:
        answer = model.chat(messages, tokens=5)
    assert (answer.prompt, answer.finish_reason) == (prompt, "length")
    assert answer.prompt_tokens == len(tokenizer(prompt).input_ids)
    assert read_gguf_header(gguf_of(llama)).metadata["tokenizer.chat_template"] == CHAT
    lost = gguf_of(llama).read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.lost_template")
    (tmp_path / "lost.gguf").write_bytes(lost)
    with open_gguf(tmp_path / "lost.gguf") as model, pytest.raises(InvalidInput, match="the file has no chat template"):
        model.chat(messages)


def test_declared_numbers_and_settings_are_those_of_the_environment(gguf_python: Path) -> None:
    child = Path(__file__).resolve().parents[2] / "tasks" / "models" / "llama_cpp" / "child.py"
    program = (
        "import runpy; from llama_cpp import llama_cpp as library;"
        f"child = runpy.run_path({str(child)!r});"
        "print(child['BATCH']); print({name.removeprefix('LLAMA_FTYPE_').removeprefix('MOSTLY_').removeprefix('ALL_'):"
        " getattr(library, name) for name in dir(library) if name.startswith('LLAMA_FTYPE_')})"
    )
    output = subprocess.run([gguf_python, "-c", program], capture_output=True, text=True, check=True).stdout
    batch, types = output.splitlines()
    assert f"batches of {batch} tokens" in runtime_versions()["llama_cpp_settings"]
    assert FILE_TYPES.items() <= eval(types).items()
    assert toolchain() == {"llama_cpp_python": "0.3.36", "gguf": "0.19.0"}


# Errors and processes


def test_a_damaged_file_is_refused_with_the_message_of_llama_cpp(llama: Model, tmp_path: Path) -> None:
    content = gguf_of(llama).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    messages = {0: "gguf_init_from_", 3: "magic", 2000: "gguf_init_from_", len(content) - 4096: "file bounds"}
    for end, message in messages.items():
        damaged.write_bytes(content[:end])
        refuses = pytest.raises(InvalidInput, match=f"damaged.gguf: llama.cpp cannot load the file: .*{message}")
        with refuses, open_gguf(damaged):
            pass
    with pytest.raises(InvalidInput, match=r"cannot load the file: .*No such file"), open_gguf(tmp_path / "x"):
        pass


def test_a_token_outside_the_vocabulary_is_an_error_and_the_process_continues(llama: Model) -> None:
    with open_gguf(gguf_of(llama)) as model:
        wanted = model.log_probabilities([1, 2, 3], [4])
        with pytest.raises(InvalidInput, match="token 600 is not in the file's vocabulary of 600 tokens"):
            model.log_probabilities([1, 2, 600], [4])
        assert model.log_probabilities([1, 2, 3], [4]) == wanted


def test_a_type_that_needs_an_importance_matrix_is_refused_by_llama_cpp(llama: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="this quantization requires an importance matrix"):
        quantize(gguf_of(llama), tmp_path / "x.gguf", "IQ2_XXS")


# The backend


def instances(kind: str, arguments: list[tuple[Any, ...]], repeats: int = 1) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, n, metadata=("task", n, repeats)) for n, each in enumerate(arguments)]


CHOICES = [(text[:40], ending) for text in TEXTS[:12] for ending in (text[40:], " yes", " or the other")]
CHOICES += [("", TEXTS[0]), ("a " * 600, "b")]  # without a context, and with one that is too long
PROMPTS = [(text[:40], {"until": ["\n", "e "], "max_gen_toks": 40}) for text in TEXTS[:6]]


def answers(model: Model, backend: str) -> dict[str, list[Any]]:
    with find_backend(backend).opened(model, FLOAT32.for_backend(backend), "cpu") as lm:
        return {
            "choices": lm.loglikelihood(instances("loglikelihood", CHOICES)),
            "rolling": lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in TEXTS])),
            "generated": lm.generate_until(instances("generate_until", PROMPTS)),
        }


@pytest.mark.parametrize("family", sampled(FAMILIES, ("llama",), pytest.mark.proof))
def test_the_backend_agrees_with_transformers_in_float32(checkpoints: dict[Family, Model], family: Family) -> None:
    model = checkpoints[family]
    wanted, actual = answers(model, "hf"), answers(as_variant(gguf_of(model), model), "llama_cpp")
    assert [loglik for loglik, _ in actual["choices"]] == pytest.approx([x for x, _ in wanted["choices"]], abs=0.01)
    assert [greedy for _, greedy in actual["choices"]] == [greedy for _, greedy in wanted["choices"]]
    assert actual["rolling"] == pytest.approx(wanted["rolling"], abs=0.01)
    assert actual["generated"] == wanted["generated"]


@pytest.fixture(scope="session")
def quantized(llama: Model) -> QuantizedModel:
    return as_variant(gguf_of(llama, "Q4_K_M"), llama)


class Killed(BaseException):
    """Simulated SIGKILL: no handler catches it, and only the journal survives."""


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_an_interrupted_run_resumes_with_the_same_bits(
    quantized: QuantizedModel, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    method, arguments = "score_answers", CHOICES
    if kind == "generate_until":
        method, arguments = "_generate_batch", [*PROMPTS, *((text[:20], sampled) for text in TEXTS[:3])]
    repeated = [request for request in instances(kind, arguments, 3) for _ in range(3)]
    backend = find_backend("llama_cpp")

    def run(location: JournalLocation | None, limit: int) -> list[Any]:
        count = 0
        with (
            backend.opened(quantized, FLOAT32.for_backend("llama_cpp"), "cpu") as lm,
            open_journal(location) as journal,
            attach_journal(lm, journal, backend.computes_in) as model,
        ):
            compute = getattr(lm, method)

            def compute_some(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > limit:
                    raise Killed
                return compute(*args, **kwargs)

            monkeypatch.setattr(lm, method, compute_some)
            return list(getattr(model, kind)(repeated))

    wanted = run(None, 10**6)
    location = JournalLocation(tmp_path / "journal", "key")
    for _ in range(40):
        try:
            assert run(location, 3) == wanted
            break
        except Killed:
            continue
    else:
        pytest.fail("the run never ended")
    if kind == "generate_until":
        assert len(set(wanted[-3:])) > 1  # repetitions of a sampled answer differ


def test_scores_do_not_depend_on_order_or_other_requests(quantized: QuantizedModel) -> None:
    with find_backend("llama_cpp").opened(quantized, FLOAT32.for_backend("llama_cpp"), "cpu") as lm:
        wanted = dict(zip(CHOICES, lm.loglikelihood(instances("loglikelihood", CHOICES)), strict=True))
        rng = random.Random(4)
        for _ in range(5):
            some = rng.sample(CHOICES, rng.randint(1, len(CHOICES)))
            assert lm.loglikelihood(instances("loglikelihood", some)) == [wanted[each] for each in some]


# Perplexity


@pytest.mark.proof
@pytest.mark.usefixtures("home")
def test_perplexity_has_the_windows_and_likelihoods_of_transformers(
    checkpoints: dict[Family, Model], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", ({"text": " ".join(TEXTS[at : at + 3])} for at in range(0, 12, 2)))
    documents = pin_documents(PerplexitySettings(documents=path), tmp_path, HashMemo(tmp_path / "h.db"))
    model = checkpoints["qwen2"]
    rows = []
    try:
        for number, each in enumerate((model, as_variant(gguf_of(model), model))):
            for length in (48, 512):  # several windows per document, and one
                out = tmp_path / f"{number} {length}"
                out.mkdir()
                windows = WindowSettings(max_length=length, batch_size=3, dtype="float32")
                assert perplexity.work(out, each, documents, windows, CPU).window == length
                rows.append(read_documents(out))
    finally:
        end_model_process()
    for wanted, actual in zip([*rows[0], *rows[1]], [*rows[2], *rows[3]], strict=True):
        assert actual._replace(loglik=0.0) == wanted._replace(loglik=0.0)
        assert actual.loglik == pytest.approx(wanted.loglik, abs=0.01)


def test_a_loaded_file_is_closed_when_another_model_is_loaded(llama: Model, quantized: QuantizedModel) -> None:
    with find_backend("llama_cpp").opened(quantized, FLOAT32, "cpu") as lm:
        first = lm.model.gguf
    with find_backend("llama_cpp").opened(quantized, FLOAT32, "cpu") as lm:
        assert lm.model.gguf is first
    with load_model(llama, dtype="float32", device="cpu"):
        assert not first.is_alive
