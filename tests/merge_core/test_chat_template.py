"""The result's chat template is the one that was asked for, in every file where a reader looks."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from family import TOKENS, merge_text, save_tokenizer

from merge_core.checkpoint.chat_template import KNOWN, chosen_template
from merge_core.errors import InvalidInput

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}, {model: c}]\nparameters: {weight: 1}\n"
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def merged_template(family: Path, wanted: str) -> str:
    (family / "a/tokenizer_config.json").write_text(json.dumps({"chat_template": "of a {{ x }}", "bos_token": "<s>"}))
    for name in "bc":
        (family / name / "chat_template.jinja").write_text("of b and c {{ x }}")
    merge_text(f"{LINEAR}{wanted}", family)
    config = json.loads((family / "out/tokenizer_config.json").read_text())
    assert config["bos_token"] == "<s>"
    template = family / "out/chat_template.jinja"
    if template.exists():
        assert template.read_text() == config["chat_template"]
    return str(config["chat_template"])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", "of a {{ x }}"),
        ("chat_template: auto", "of b and c {{ x }}"),
        ("chat_template: '{{ messages }} and more'", "{{ messages }} and more"),
        ("chat_template: chatml", KNOWN["chatml"]),
    ],
)
def test_the_template_asked_for_is_written(family: Path, wanted: str, found: str) -> None:
    assert merged_template(family, wanted) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("alpaca", "### Instruction:\nhello\n\n### Response:\nhi</s>\n\n### Response:\n"),
        ("mistral", "<s>[INST] hello [/INST] hi</s>"),
        (
            "llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("exaone", "[|user|]hello\n[|assistant|]hi[|endofturn|]\n[|assistant|]"),
    ],
)
def test_a_known_template_renders_its_format(name: str, text: str) -> None:
    template = jinja2.Environment().from_string(KNOWN[name])
    assert template.render(messages=TALK, add_generation_prompt=True, bos_token="<s>", eos_token="</s>") == text


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'chatml'"):
        chosen_template("chatlm", [], "here")


def test_auto_without_any_template_is_refused() -> None:
    with pytest.raises(InvalidInput, match="none has one"):
        chosen_template("auto", [None, None], "here")


def ends_of(merged: Path) -> object:
    file = merged / "generation_config.json"
    return json.loads(file.read_text()).get("eos_token_id") if file.exists() else None


@pytest.mark.parametrize(
    ("wanted", "base", "tuned", "found"),
    [
        ("", 1, [1, 5], 1),  # The result has no other template than its own.
        ("chat_template: auto", 1, [1, 5], [1, 5]),
        ("chat_template: auto", [2, 1], 5, [2, 1, 5]),
        ("chat_template: auto", [5, 1], 5, [5, 1]),
        ("chat_template: auto", None, 5, None),  # The result had no end that one could add to.
        ("chat_template: auto", 1, None, 1),
        ("chat_template: 'of b {{ x }}'", 1, 5, [1, 5]),
        ("chat_template: 'of nobody {{ x }}'", 1, 5, 1),
        ("chat_template: chatml", 1, 5, [1, 23]),
        ("chat_template: mistral", 1, 5, 1),
    ],
)
def test_an_answer_ends_with_what_ends_one_in_the_template(
    family: Path, wanted: str, base: object, tuned: object, found: object
) -> None:
    for name, end in (("base", base), ("b", tuned)):
        if end is not None:
            (family / name / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "top_k": 7}))
    (family / "b" / "chat_template.jinja").write_text("of b {{ x }}")
    for name in ("base", "a", "b"):
        tokenizer = json.loads((family / name / "tokenizer.json").read_text())
        tokens = tokenizer["model"]["vocab"]
        tokens["<|im_end|>"] = tokens.pop("t23")
        (family / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = (
        "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
    )
    record = merge_text(f"{text}{wanted}", family)
    assert ends_of(family / "out") == found
    if (family / "out" / "generation_config.json").exists():
        assert "generation_config.json" in record.files
        assert json.loads((family / "out" / "generation_config.json").read_text())["top_k"] == 7


def test_the_end_of_a_turn_follows_its_token_where_rows_move(family: Path) -> None:
    tokens = [f"t{number}" for number in range(TOKENS)]
    tokens[5], tokens[9] = tokens[9], tokens[5]
    save_tokenizer(family / "b", tokens)
    (family / "a" / "generation_config.json").write_text('{"eos_token_id": 1}')
    (family / "b" / "generation_config.json").write_text('{"eos_token_id": 5}')
    (family / "b" / "chat_template.jinja").write_text("of b {{ x }}")
    text = LINEAR.replace(", {model: c}", "") + "chat_template: auto\ntokenizer: {source: a}\n"
    merge_text(text, family)
    assert ends_of(family / "out") == [1, 9]
