"""Profiles from ``mergegate init`` pass the check without edits. It prompts on a terminal for what no flag provides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from demo_project import PROFILES, Project, expect
from samples import sampled
from terminal import terminal
from typer.testing import CliRunner

from mergegate.flows.cli.drafts import claimed_tasks
from mergegate.flows.cli.init import directory_for_new_files, prompt, write_new_files
from mergegate.flows.profile import profile_schema
from mergegate.merge_core.errors import InvalidInput
from tools.reference_pages import generated_pages, split_default

TEXTS = {
    "base": ["the cat sat on the mat", "rain falls on the hills and the rivers rise", "bread is baked in the morning"],
    "sums": ["two and two are four", "three and four are seven", "seven and two are nine, and one more is ten"],
    "verse": ["the moon is a boat on the hills", "the rivers sing and the morning sings", "a cat sings of bread"],
}
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class MadeFamily(NamedTuple):
    """An architecture with the tokenizer, license and chat template that its publisher ships."""

    tokenizer: Callable[[], Any]
    model: Callable[[Any], Any]  # takes the tokenizer
    license: str
    chat: str
    ends: str  # end-of-turn token of the fine-tunes


def _pieces(size: int, byte_level: bool, special: list[str]) -> dict[str, Any]:
    """Train a BPE tokenizer on the texts and return its vocabulary and merges."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>", byte_fallback=not byte_level))
    if byte_level:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        show_progress=False,
    )
    trained.train_from_iterator([line for lines in TEXTS.values() for line in lines], trainer)
    model = json.loads(trained.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _qwen2_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    made = Qwen2Tokenizer(**_pieces(320, True, ["<|endoftext|>"]))
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def _gemma_tokenizer() -> Any:
    from transformers import GemmaTokenizer

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    made = GemmaTokenizer(**_pieces(360, False, ["<pad>", "<eos>", "<bos>", "<unk>", *turns, *bytes_]))
    made.add_special_tokens({"additional_special_tokens": turns})
    return made


def _qwen2(tokenizer: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rows = -(-len(tokenizer) // 64) * 64  # padded like the published models: some rows have no token
    ends = tokenizer.eos_token_id
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=rows, tie_word_embeddings=True, bos_token_id=ends, eos_token_id=ends, **SMALL)
    )


def _gemma2(tokenizer: Any) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(vocab_size=len(tokenizer), head_dim=8, sliding_window=64, **SMALL))


FAMILIES = {
    "qwen2": MadeFamily(_qwen2_tokenizer, _qwen2, "apache-2.0", QWEN_CHAT, "<|im_end|>"),
    "gemma2": MadeFamily(_gemma_tokenizer, _gemma2, "gemma", GEMMA_CHAT, "<end_of_turn>"),
}


def write_family(root: Path, family: MadeFamily, claims: str = "") -> list[str]:
    """Write the models ``base``, ``sums`` and ``verse`` below ``root`` and return their names.

    The base is trained briefly. Each fine-tune starts from it, is trained on its own texts and has a chat template.

    ``claims`` is the dataset that the model cards of the fine-tunes name.
    """
    import torch

    torch.manual_seed(7)
    tokenizer = family.tokenizer()
    model = family.model(tokenizer)
    start: dict[str, Any] = {}
    for name, texts in TEXTS.items():
        model.load_state_dict(start or model.state_dict())
        _train(model.float(), tokenizer, texts)
        model.to(torch.bfloat16)
        if name == "base":
            start = {key: value.clone() for key, value in model.state_dict().items()}
        else:
            tokenizer.chat_template = family.chat
            ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, family.ends])
            model.generation_config.eos_token_id = ends
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        of_base = "" if name == "base" else f"base_model: acme/base\ndatasets: [{claims}]\n"
        card = f"---\nlicense: {family.license}\n{of_base}---\n\n# {name}\n"
        (root / name / "README.md").write_text(card)
    return list(TEXTS)


def _train(model: Any, tokenizer: Any, texts: list[str]) -> None:
    import torch

    steps = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for text in texts * 3:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        steps.step()
        steps.zero_grad()


MODELS = ("models/base", "models/sums", "models/verse")
NAME, WHO, TEXT = "name of the release", "accept these license gaps?", "held-out text"
TASKS = "tasks that the merge must not lose"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a model family by name, once per test process."""

    @cache
    def train(name: str) -> Path:
        write_family(root := tmp_path_factory.mktemp(name), FAMILIES[name])
        return root

    return train


@pytest.fixture
def root(tmp_path: Path, families: Callable[[str], Path]) -> Path:
    """Write a model family in which one model has no card, so its license is in doubt."""
    shutil.copytree(families("qwen2"), tmp_path / "models")
    (tmp_path / "models" / "verse" / "README.md").unlink()
    return tmp_path


def with_a_token_of_its_own(model: Path) -> None:
    """Add a padding token, as some fine-tunes do: one more embedding row and a different tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, tuned = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tuned.resize_token_embeddings(max(len(tokenizer), tuned.config.vocab_size), mean_resizing=False)
    tuned.save_pretrained(model)
    tokenizer.save_pretrained(model)


@pytest.mark.story
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("differs", [False, True], ids=["one tokenizer", "two tokenizers"])
def test_a_pair_made_by_transformers_passes_the_check_unedited(
    project: Project, families: Callable[[str], Path], family: str, differs: bool
) -> None:
    shutil.copytree(families(family), project.root / "models")
    if differs:
        with_a_token_of_its_own(project.root / "models" / "verse")
    arguments = ("init", *MODELS, "--yes", "-o", "nightly", "--name", "both")
    expect(project.mergegate(*arguments), 0, "next     mergegate run nightly/both.yaml")
    checked = expect(project.mergegate("check", "nightly/both.yaml", "--json"), 0)
    findings = json.loads(checked.stdout)["findings"]
    warned = [one["where"] for one in findings if one["severity"] != "info"]
    assert [place for place in warned if "pad_token" not in place] == []
    profile = yaml.safe_load((project.root / "nightly" / "both.yaml").read_text())
    assert profile["checks"]["license"] == {"purpose": "commercial", "visibility": "public"}
    recipe = yaml.safe_load((project.root / "nightly" / "both.recipe.yaml").read_text())
    assert recipe["chat_template"] == "auto"  # the base has none
    assert recipe.get("tokenizer") == ({"source": "union"} if differs else None)
    expect(project.mergegate(*arguments), 2, "it exists")


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_of_what_was_drafted_ends_in_a_verdict(project: Project, family: str) -> None:
    models = write_family(project.root / "models", FAMILIES[family], claims="openai/gsm8k")  # not available offline
    assert project.mergegate("init", *(f"models/{name}" for name in models), "--yes", "--name", "both").exit_code == 0
    told = json.loads(project.mergegate("run", "both.yaml", "--json").stdout)
    assert told["status"] in ("released", "refused"), told["message"]
    assert told["content"]["verdict"]["drift"]["outcome"] in ("pass", "fail", "inconclusive")  # not an error
    assert told["findings"] == []


def test_tasks_are_those_of_which_the_card_speaks() -> None:
    index = [{"name": "m", "results": [{"dataset": {"type": "openai/gsm8k", "name": "Grade School Math"}}]}]
    assert claimed_tasks({"model-index": index, "datasets": ["allenai/ai2_arc"], "tags": ["math"]}) == (
        "gsm8k",
        "arc_challenge",
    )
    assert claimed_tasks({"model-index": "nonsense", "datasets": None}) == ()


def test_schemas_and_the_reference_are_those_of_the_types() -> None:
    docs = PROFILES.parent / "docs"
    stale = [name for name, text in generated_pages().items() if (docs / name).read_text(encoding="utf-8") != text]
    assert not stale, "stale: make reference"


def test_a_printed_default_is_that_of_the_schema() -> None:
    schema = profile_schema()
    for kind in (schema, *schema["$defs"].values()):
        for key, value in kind.get("properties", {}).items():
            raw, printed = value.get("default"), split_default(value)[1].partition(",")[0].strip("`")
            if not raw or isinstance(raw, (dict, list)):
                continue
            if isinstance(raw, str) or raw is True:
                assert printed == str(raw).replace("True", "true"), key
            else:
                number, _, unit = printed.replace("%", " %").partition(" ")
                assert float(number) * {"%": 0.01, "GiB": 2**30, "": 1}[unit] == pytest.approx(raw), key


@pytest.mark.parametrize(("kind", "pattern"), [("profile", "*.yaml"), ("recipe", "demo/recipes/*.yaml")])
def test_every_shipped_profile_and_recipe_keeps_to_the_schema(kind: str, pattern: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(generated_pages()[f"schema/{kind}.json"]))
    assert list(PROFILES.glob(pattern))
    for file in PROFILES.glob(pattern):
        for document in yaml.safe_load_all(file.read_text()):
            assert [f"{file.name}: {one.json_path}: {one.message}" for one in validator.iter_errors(document)] == []


# --- prompts on a terminal ---


@pytest.fixture
def tasks(root: Path) -> Path:
    """Write two tasks with their own data, because no task of lm-eval has its data here."""
    with (root / "sums.jsonl").open("w") as data:
        data.writelines(f'{{"question": "{n} + 1 =", "answer": " {n + 1}"}}\n' for n in range(300))
    for name in ("plus", "more"):
        (root / f"{name}.yaml").write_text(
            f"task: {name}\ntest_split: test\n"
            "dataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\n"
            'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
            "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        )
    return root


@pytest.mark.story
def test_an_undeclared_license_needs_acceptance(root: Path) -> None:
    project = Project(root)
    doubted = expect(project.mergegate("init", *MODELS, "--json", "-o", "doubted"), 3)
    assert "verse" in " ".join(json.loads(doubted.stdout)["doubts"])
    (profile,) = (file for file in map(Path, json.loads(doubted.stdout)["files"]) if "recipe" not in file.name)
    expect(project.mergegate("check", str(profile)), 3)
    expect(project.mergegate("init", *MODELS, "--json", "-o", "settled", "--accept", "alice: it is ours"), 0)


def files_in(place: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in place.iterdir()} if place.exists() else {}


@pytest.mark.proof
def test_an_invalid_answer_is_prompted_again(tasks: Path) -> None:
    root = tasks
    (root / "taken.yaml").write_text("ours\n")
    (root / "empty.txt").touch()
    (root / "own.txt").write_text("A text.\n\nAnother one.\n")
    answers = {
        NAME: {"a/b": "letters, digits", "taken": "it exists", "mine": ""},
        WHO: {"me": "'name: reason'", "alice: we made it": ""},
        TEXT: {"nowhere.txt": "no such file", "models": "a directory", "empty.txt": "an empty file", "own.txt": ""},
        TASKS: {"nosuch_task": "nosuch_task", "plus.yaml:nobody": "best parent", "plus.yaml:sums, more.yaml": ""},
    }
    with terminal(root, "init", *MODELS) as screen:
        for question, typed in answers.items():
            for answer, why_not in typed.items():
                screen.see(question)
                screen.see(": ")
                screen.type(f"{answer}\n")
                if why_not:
                    screen.see("Error: ")
                    screen.see(why_not)
        assert screen.end() == 0, screen.shown
    assert (root / "taken.yaml").read_text() == "ours\n"
    profile = (root / "mine.yaml").read_text()
    assert "alice: we made it" in profile
    assert "documents: own.txt" in profile
    assert "{task: plus.yaml, guarded_by: sums, max_drop: 3}" in profile
    assert "{task: more.yaml, guarded_by: best parent, max_drop: 3}" in profile


@pytest.mark.proof
@pytest.mark.parametrize("last", sampled([NAME, WHO, TEXT, TASKS], [NAME, TASKS], pytest.mark.proof))
def test_ctrl_c_at_a_question_ends_it_and_leaves_nothing(root: Path, last: str) -> None:
    before = set(root.iterdir())
    with terminal(root, "init", *MODELS, "-o", "new/place") as screen:
        for question in (NAME, WHO, TEXT, TASKS):
            screen.see(question)
            screen.see(": ")
            if question == last:
                break
            screen.type("\n")
        assert screen.interrupt() == 130, screen.shown
    assert "Traceback" not in screen.shown
    assert set(root.iterdir()) - before <= {root / ".mergegate"}


def test_a_prompt_repeats_until_the_answer_is_valid() -> None:
    def even(text: str) -> str:
        if not text.isdigit() or int(text) % 2:
            raise InvalidInput("here", found=repr(text), expected="an even number")
        return text

    app = typer.Typer()
    app.command()(lambda: typer.echo(f"got {prompt('how many', '4', even)}"))
    done = CliRunner().invoke(app, input="x\n3\n 8 \n")
    assert "got 8" in done.output
    assert done.output.count("Error:") == 2
    assert "'3'; expected: an even number" in done.output
    assert "got 4" in CliRunner().invoke(app, input="\n").output


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    with pytest.raises(KeyboardInterrupt), directory_for_new_files(place):
        raise KeyboardInterrupt
    assert not (tmp_path / "new").exists()
    with directory_for_new_files(place):
        write_new_files({place / "a": "1", place / "b": "2"})
    with pytest.raises(InvalidInput, match="b: it exists"), directory_for_new_files(place):
        write_new_files({place / "c": "3", place / "b": "4"})
    assert files_in(place) == {"a": "1", "b": "2"}
    with pytest.raises(UnicodeEncodeError):  # an error while a file is being written
        write_new_files({place / "c": "3", place / "d": "\ud800"})
    assert files_in(place) == {"a": "1", "b": "2"}
