"""The result has the chat template that the recipe requests, in every file in which a library looks for one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from family import LINEAR as PAIR
from family import TOKENS, change_json, check_recipe, merge_text, save_family, save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mergegate.merge_core.checkpoint import list_companions
from mergegate.merge_core.checkpoint.chat_template import DEFAULT, KNOWN, read_chat_templates, select_chat_templates
from mergegate.merge_core.errors import InvalidInput

LINEAR = PAIR.replace("{model: b}", "{model: b}, {model: c}")
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


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


@pytest.mark.parametrize(
    ("wanted", "parents", "words"),
    [("chatlm", [], "did you mean 'chatml'"), ("auto", [{}, {}], "at least one parent with a chat template")],
)
def test_a_misspelt_name_and_auto_without_any_template_are_refused(wanted: str, parents: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        select_chat_templates(wanted, parents, "here")


def ends_of(merged: Path) -> object:
    file = merged / "generation_config.json"
    return json.loads(file.read_text()).get("eos_token_id") if file.exists() else None


@pytest.mark.parametrize(
    ("wanted", "base", "tuned", "found"),
    [
        ("", 1, [1, 5], [1, 5]),  # Without a choice, the result ends where any of its models ends.
        ("chat_template: auto", 1, [1, 5], [1, 5]),
        ("chat_template: auto", [2, 1], 5, [2, 1, 5]),
        ("chat_template: auto", [5, 1], 5, [5, 1]),
        ("chat_template: auto", None, 5, None),  # The result has no end token to add to.
        ("chat_template: auto", 1, None, 1),
        ("chat_template: 'of b {{ x }}'", 1, 5, [1, 5]),
        ("chat_template: 'of nobody {{ x }}'", 1, 5, 1),
        ("chat_template: chatml", 1, 5, [1, 23]),
        ("chat_template: mistral", 1, 5, 1),
    ],
)
def test_an_answer_ends_with_the_end_token_of_the_template(
    family: Path, wanted: str, base: object, tuned: object, found: object
) -> None:
    for name, end in (("base", base), ("b", tuned)):
        if end is not None:
            (family / name / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "top_k": 7}))
    (family / "b" / "chat_template.jinja").write_text("of b {{ x }}")
    for name in ("base", "a", "b"):
        save_tokenizer(family / name, [*(f"t{number}" for number in range(23)), "<|im_end|>"])
    text = PAIR.replace("linear", "task_arithmetic\nbase_model: base")
    record = merge_text(f"{text}{wanted}", family)
    assert ends_of(family / "out") == found
    if (family / "out" / "generation_config.json").exists():
        assert "generation_config.json" in record.files
        assert json.loads((family / "out" / "generation_config.json").read_text())["top_k"] == 7


def test_the_end_of_a_turn_follows_its_token_if_rows_move(family: Path) -> None:
    tokens = [f"t{number}" for number in range(TOKENS)]
    tokens[5], tokens[9] = tokens[9], tokens[5]
    save_tokenizer(family / "b", tokens)
    (family / "a" / "generation_config.json").write_text('{"eos_token_id": 1}')
    (family / "b" / "generation_config.json").write_text('{"eos_token_id": 5}')
    (family / "b" / "chat_template.jinja").write_text("of b {{ x }}")
    text = PAIR + "chat_template: auto\ntokenizer: {source: a}\n"
    merge_text(text, family)
    assert ends_of(family / "out") == [1, 9]


@pytest.mark.parametrize(
    "tokenizer", ["tokenizer_source: base", "tokenizer: {source: a}", "tokenizer: {source: union}"]
)
@pytest.mark.parametrize("base", ["a", "b"])
def test_a_base_that_only_a_slice_names_adds_no_end_token(family: Path, tokenizer: str, base: str) -> None:
    for name, end in {"a": 1, "b": 5, "c": 2}.items():
        (family / name / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (family / "b" / "chat_template.jinja").write_text("of b {{ x }}")
    text = (
        f"merge_method: linear\nslices: [{{base_model: {base}, sources: [{{model: a, layer_range: [0, 3]}},"
        " {model: c, layer_range: [0, 3]}]}]\nparameters: {weight: 1}\n"
        f"chat_template: 'of b {{{{ x }}}}'\n{tokenizer}\n"
    )
    merge_text(text, family)
    assert ends_of(family / "out") == 1


texts = st.sampled_from(["{{ one }}", "{{ two }}", "{% for m in messages %}{{ m }}{% endfor %}", ""])
named = st.dictionaries(st.sampled_from(["default", "tool_use", "rag", "a b"]), texts, max_size=3)
declared = st.one_of(
    st.none(),
    texts,
    named,
    named.map(lambda templates: [{"name": name, "template": text} for name, text in templates.items()]),
)


def write_templates(directory: Path, in_settings: object, default: str | None, more: dict[str, str]) -> None:
    """Write a tokenizer and its chat templates in every place in which a library may look for them."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1"}
    settings |= {} if in_settings is None else {"chat_template": in_settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    change_json(directory / "tokenizer.json", added_tokens=[], model={**model, "unk_token": "t0"})
    files = {} if default is None else {"chat_template.jinja": default}
    for name, text in (
        files | {f"additional_chat_templates/{name}.jinja": text for name, text in more.items()}
    ).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def library_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates that transformers finds."""
    found = AutoTokenizer.from_pretrained(directory).chat_template
    return {"default": found} if isinstance(found, str) else dict(found or {})


@settings(max_examples=20, deadline=None)
@given(declared, st.none() | texts, named)
def test_templates_are_read_as_transformers_reads_them(
    tmp_path_factory: pytest.TempPathFactory, in_settings: object, default: str | None, more: dict[str, str]
) -> None:
    directory = tmp_path_factory.mktemp("templates")
    save_tokenizer(directory, [f"t{number}" for number in range(8)])
    write_templates(directory, in_settings, default, more)
    assert read_chat_templates(list_companions(directory)) == library_templates(directory)


@pytest.mark.story
@settings(max_examples=15, deadline=None)
@given(st.tuples(declared, st.none() | texts, named), st.booleans())
def test_the_merge_has_the_templates_of_its_parents(
    tmp_path_factory: pytest.TempPathFactory, templates: Any, is_auto: bool
) -> None:
    family = save_family(tmp_path_factory.mktemp("merged"))
    for name in "abc":
        write_templates(family / name, *templates)
    expected = library_templates(family / "a")
    merge_text(f"{LINEAR}{'chat_template: auto' if is_auto and expected else ''}", family)
    assert library_templates(family / "out") == expected


def test_auto_counts_templates_of_every_form_and_a_chosen_one_replaces_all(family: Path) -> None:
    write_templates(family / "a", "of a", None, {"tool_use": "tools of a"})
    write_templates(family / "b", [{"name": "default", "template": "of b"}], None, {})
    write_templates(family / "c", None, "of b", {"tool_use": "tools of c"})
    merge_text(f"{LINEAR}chat_template: auto\n", family)
    assert library_templates(family / "out") == {"default": "of b"}  # b comes first and names no other template.
    merge_text(f"{LINEAR}chat_template: chatml\n", family, "chosen")
    step = PAIR.replace("model: a", "model: first").replace("model: b", "model: c")
    merge_text(f"name: first\n{PAIR}chat_template: chatml\n---\n{step}", family, "step")
    for out in ("chosen", "step"):
        assert library_templates(family / out) == {DEFAULT: KNOWN["chatml"]}
        content = json.loads((family / out / "tokenizer_config.json").read_text())
        assert (content["chat_template"], content["eos_token"]) == (KNOWN["chatml"], "t1")


FORMS: dict[str, tuple[object, str | None, dict[str, str]]] = {
    "text": ("one", None, {}), "list": ([{"name": "default", "template": "one"}], None, {}),
    "object": ({"default": "one"}, None, {}), "file": (None, "one", {}), "file over text": ("two", "one", {}),
}  # fmt: skip


@pytest.mark.parametrize("first", FORMS)
def test_one_template_in_two_forms_has_no_findings(family: Path, first: str) -> None:
    write_templates(family / "a", *FORMS[first])
    for other in FORMS.values():
        (family / "b" / "chat_template.jinja").unlink(missing_ok=True)
        write_templates(family / "b", *other)
        assert template_findings(family) == []


def test_templates_are_compared_by_name(family: Path) -> None:
    write_templates(family / "a", None, "one", {"tool_use": "tools"})
    write_templates(family / "b", None, "one", {"tool_use": "other tools", "rag": "found"})
    assert template_findings(family) == ["the result gets a different tool_use; the result gets no rag"]
    assert template_findings(family, "chat_template: chatml") == [
        "the result gets no tool_use",
        "the result gets no rag, tool_use",
    ]


def template_findings(family: Path, more: str = "") -> list[str]:
    return [one.found for one in check_recipe(PAIR + more, family).findings if one.where.endswith(": chat template")]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (5, "chat_template: 5"), ([5], "chat_template"), ([{"name": "x"}], "an entry with name 'x'"),
        ([{"name": 1, "template": "{{ x }}"}], "an entry with name 1"), ({"x": None}, "an entry with name 'x'"),
        ([{"name": "../x", "template": "{{ x }}"}], "name '../x'"),
    ],
)  # fmt: skip
def test_a_template_that_no_library_can_use_is_refused_by_name(tmp_path: Path, declared: object, message: str) -> None:
    save_tokenizer(tmp_path, ["x"])
    write_templates(tmp_path, declared, None, {})
    with pytest.raises(InvalidInput, match=re.escape(message)):
        read_chat_templates(list_companions(tmp_path))
