"""The result's chat template is the one that was asked for, in every file where a reader looks."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from family import merge_text

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
