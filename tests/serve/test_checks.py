"""Checks against a running server: a good model passes, and each fault is refused with a specific reason."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openai_server import Canned, Tiny, serving
from PIL import Image
from tiny_kinds import write
from variants import DEMO, copied, model_in, with_config

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.http import Answer, JsonClient
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import load_model
from mergegate.tasks.quality.serve import checks
from mergegate.tasks.quality.serve.answers import Completion, parse_completion, parse_models
from mergegate.tasks.quality.serve.checks import ServedSubject, compare_answers, looped_share, measure_speed
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.stage import RunningServer, smoke_url
from mergegate.tasks.quality.serve.verdict import Check, ServedModels, ServeVerdict

torch.set_num_threads(1)

CHECKS = (
    *("tensors", "vocabulary", "finite weights", "finite logprobs", "text", "greedy twice", "no loop", "parity"),
    *("tokenizer", "chat", "chat template", "end of sequence", "stops", "over-long prompt", "throughput"),
)
SETTINGS = ServeSettings(prompts=("rev: abcd>", "the old "), texts=("the old pig sees the red cat.",), max_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_in(copied(DEMO / "models" / "reverser", tmp_path_factory.mktemp("served") / "reverser"))


@pytest.fixture(scope="module")
def tiny(model: Model) -> Tiny:
    return Tiny(model.directory)


Smoke = Callable[..., ServeVerdict]


@pytest.fixture
def smoke(model: Model, tiny: Tiny) -> Smoke:
    def ask(*faults: str, settings: ServeSettings = SETTINGS, checkpoint: Model | None = model) -> ServeVerdict:
        with serving(tiny, *faults) as server:
            return smoke_url(RunningServer(server.root), settings, checkpoint=checkpoint)

    return ask


def named(verdict: ServeVerdict, name: str) -> Check:
    return next(check for check in verdict.checks if check.name == name)


@pytest.mark.proof
def test_a_good_model_passes_every_check(smoke: Smoke) -> None:
    verdict = smoke(settings=SETTINGS.model_copy(update={"stops": ("rev: hgfe>",), "min_tokens_per_second": 0.01}))
    assert {check.name: check.outcome for check in verdict.checks} == dict.fromkeys(CHECKS, "pass")
    assert verdict.outcome == "pass"
    assert verdict.publication_error() is None
    assert verdict.measured.tokens_per_second is not None
    assert verdict.measured.seconds_to_first_token is not None
    assert verdict.measured.peak_memory is None, "whose process it is, is not known"
    assert verdict.measured.machine == ""


@pytest.mark.story
@pytest.mark.parametrize(
    ("fault", "name", "seen"),
    [
        ("nan", "finite logprobs", "are not finite"),
        ("empty", "text", "nothing after 2 of 2 prompts"),
        ("loop", "no loop", "2 of 2; 100 % at most"),
        ("moody", "greedy twice", "then"),
        ("shifted", "parity", "0.2000 on average"),
        ("other ids", "tokenizer", "id 0 is"),
        ("endless", "end of sequence", "the server continues after id 2: length"),
        ("cut prompts", "over-long prompt", "HTTP 200 to 80 tokens"),
    ],
)
def test_each_fault_is_refused_with_its_own_reason(smoke: Smoke, fault: str, name: str, seen: str) -> None:
    verdict = smoke(fault)
    check = named(verdict, name)
    assert (verdict.outcome, check.outcome) == ("fail", "fail")
    assert seen in check.seen
    assert all((check.expected, check.remedy))
    refusal = verdict.publication_error()
    assert refusal is not None
    assert refusal.exit_code == 3


@pytest.mark.story
def test_progress_and_the_section_of_the_report_say_what_is_checked(tiny: Tiny) -> None:
    steps: list[str] = []
    with serving(tiny, "no chat") as server:
        verdict = smoke_url(RunningServer(server.root), SETTINGS, on_progress=lambda _, step: steps.append(step))
    assert steps[:2] == ["checking a first answer", "checking text"]
    assert (verdict.outcome, named(verdict, "chat").outcome) == ("pass", "not offered")
    section = ServedModels(verdict=verdict).as_verdict().section
    assert section is not None
    assert section.columns == ("check", "outcome", "expected")


@pytest.mark.story
def test_what_a_server_lacks_is_not_offered_and_not_passed(smoke: Smoke) -> None:
    verdict = smoke("no chat", "plain")
    assert verdict.outcome == "pass"
    assert {check.name for check in verdict.checks if check.outcome == "not offered"} == {"tokenizer", "chat"}
    assert named(verdict, "parity").outcome == "pass", "echo is the older way to ask for it"
    verdict = smoke("no chat", settings=SETTINGS.model_copy(update={"chat": True}))
    assert [check.name for check in verdict.failures] == ["chat"]
    assert "serve.chat is true" in verdict.failures[0].expected


@pytest.mark.story
def test_an_ignored_bias_is_not_a_missing_stop(smoke: Smoke) -> None:
    check = named(smoke("unbiased"), "end of sequence")
    assert (check.outcome, check.seen) == ("not offered", "the server ignores logit_bias")


@pytest.mark.story
def test_a_server_that_refuses_unknown_fields_is_asked_without_them(smoke: Smoke) -> None:
    verdict = smoke("strict")
    assert named(verdict, "greedy twice").outcome == "pass"
    assert named(verdict, "parity").outcome == "pass"
    assert verdict.outcome == "pass"


@pytest.mark.parametrize(
    ("seconds", "requests", "expected", "seen"),
    [
        (1, 6, (1.0, 16.0), "16 tokens/s"),
        (30, 2, (30.0, pytest.approx(16 / 30)), "0.53 tokens/s"),  # a slow server is not measured three times
    ],
)
def test_the_speed_is_that_of_one_stream_and_the_quickest_of_three(
    seconds: int, requests: int, expected: tuple[float, float], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 100 * seconds, seconds))  # Between two reads of the clock, a request takes these seconds.
    monkeypatch.setattr("mergegate.tasks.quality.serve.checks.time", SimpleNamespace(monotonic=lambda: next(now)))
    with serving(Canned()) as server:
        check, cost = measure_speed(ServedSubject(JsonClient(server.root, 10), "tiny", SETTINGS, None, None))
    assert (len(server.bodies), (cost.seconds_to_first_token, cost.tokens_per_second)) == (requests, expected)
    assert (check.outcome, check.seen) == ("pass", seen)


def test_throughput_has_a_floor_and_without_a_checkpoint_there_is_nothing_to_compare_with() -> None:
    with serving(Canned()) as server:
        verdict = smoke_url(RunningServer(server.root), SETTINGS.model_copy(update={"min_tokens_per_second": 1e9}))
    assert [check.name for check in verdict.failures] == ["throughput"]
    assert verdict.failures[0].expected == "≥ 1e+09 tokens/s"
    assert named(verdict, "parity").outcome == "not offered"


def test_a_prompt_that_must_stop_and_does_not_is_refused() -> None:
    settings = SETTINGS.model_copy(update={"stops": ("the old ",), "max_tokens": 8})
    with serving(Canned()) as server:
        verdict = smoke_url(RunningServer(server.root), settings)
    assert [check.name for check in verdict.failures] == ["stops"]
    assert "length at 8 tokens" in verdict.failures[0].seen


@pytest.mark.story
def test_a_turn_end_that_does_not_stop_is_refused(tmp_path: Path, smoke: Smoke) -> None:
    # A common fault of merges of base and chat models: the template ends a turn with </s>, the configuration with
    # another id.
    directory = copied(DEMO / "models" / "reverser", tmp_path / "reverser")
    with_config(directory, "generation_config.json", eos_token_id=7)
    with_config(directory, eos_token_id=7)
    with_config(directory, "tokenizer_config.json", eos_token="e")
    template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    check = named(smoke(checkpoint=model_in(directory)), "end of sequence")
    assert check.outcome == "fail"
    assert "ends with '</s>' (id 2), which does not end the sequence" in check.seen
    assert check.remedy == "add 2 to eos_token_id"


@pytest.mark.story
def test_a_template_that_cannot_be_rendered_is_refused(tmp_path: Path, smoke: Smoke) -> None:
    directory = copied(DEMO / "models" / "reverser", tmp_path / "reverser")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in named(smoke(checkpoint=model_in(directory)), "chat").seen


@pytest.mark.story
def test_a_server_that_does_not_answer_is_not_waited_for_twice(tmp_path: Path) -> None:
    with serving(Canned(), "silent") as server:
        verdict = smoke_url(RunningServer(server.root), SETTINGS.model_copy(update={"request_timeout": 2}))
    assert [(check.name, check.seen) for check in verdict.checks] == [("a first answer", "no answer in 2 s")]
    assert verdict.outcome == "fail"


@pytest.mark.parametrize("suffix", ["", "/v1/"])
def test_an_address_may_end_with_v1_and_errors_name_the_page_once(suffix: str) -> None:
    with serving(Canned()) as server:
        with pytest.raises(InvalidInput) as missing:
            smoke_url(RunningServer(f"{server.root}/elsewhere{suffix}"), SETTINGS)
        with pytest.raises(InvalidInput, match="serves tiny") as unlisted:
            smoke_url(RunningServer(f"{server.root}{suffix}", "huge"), SETTINGS)
        verdict = smoke_url(RunningServer(f"{server.root}{suffix}"), SETTINGS)
    with pytest.raises(InvalidInput, match="Connection refused") as unreachable:
        smoke_url(RunningServer(f"{server.root}{suffix}"), SETTINGS)
    assert missing.value.where == f"{server.root}/elsewhere/v1/models"
    assert missing.value.found == "HTTP 404 Not Found"
    assert "check the address" in missing.value.remedy
    assert "/v1" not in missing.value.remedy
    assert unlisted.value.where == f"{server.root}/v1/models"
    assert (verdict.server, unreachable.value.where) == (server.root, server.root)


def test_the_reference_is_the_plain_sum_over_the_softmax(model: Model) -> None:
    from mergegate.tasks.quality.serve.answers import ReferenceRequest, make_reference

    reference = make_reference(model, ReferenceRequest(("the old pig",), "abc", "float32", "cpu", 64))
    (text,) = reference.texts
    with load_model(model, dtype="float32", device="cpu") as loaded, torch.inference_mode():
        logits = loaded.network(torch.tensor([text.ids])).logits[0].double()
    expected = [float(logits[at, number] - torch.logsumexp(logits[at], 0)) for at, number in enumerate(text.ids[1:])]
    assert text.logprobs == pytest.approx(expected, abs=1e-5)
    assert reference.ends == (2,)
    assert reference.chat is not None
    assert reference.chat.turn_ends == (2, "</s>")


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0.0),
        ([1] * 10, 1.0),
        ([1, 2] * 5, 1.0),
        ([9, 8, 7, 6, 5, 1, 2, 3, 1, 2, 3, 1, 2, 3], 9 / 14),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 0.0),  # Five tokens repeated once are normal in ordinary text.
    ],
)
def test_the_share_of_a_repeated_pattern(tokens: list[int], share: float) -> None:
    assert looped_share(tokens) == pytest.approx(share)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_a_pattern_that_is_repeated_long_enough_is_always_found(start: list[int], pattern: list[int]) -> None:
    tokens = start + pattern * 40
    assert looped_share(tokens) >= len(pattern) * 40 / len(tokens) - 1e-9


MODELS = {"data": [{"id": "served", "max_model_len": 4096}]}
CHOICE = {"text": "pig", "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["pi", "g"]}, "token_ids": [7, 8]}
CHOICE |= {"prompt_logprobs": [None, {"5": {"logprob": -1.5}}], "finish_reason": "stop"}
COMPLETION = {"choices": [CHOICE], "usage": {"completion_tokens": 2}}
SAID = {"message": {"reasoning_content": "a ", "reasoning": "pink ", "content": "pig"}, "finish_reason": "stop"}
CHAT = {"choices": [{**SAID, "logprobs": {"content": [{"logprob": -0.5}]}}], "usage": {"completion_tokens": 1}}
FIELDS: dict[tuple[str, str], Callable[[Any], bool]] = {  # whether a value has the right type
    ("models", "data"): lambda value: isinstance(value, list),
    ("models", "data 0 id"): lambda value: isinstance(value, str),
    ("models", "data 0 max_model_len"): lambda value: value == 5,
    ("completion", "choices"): lambda value: isinstance(value, list),
    ("completion", "choices 0 text"): lambda value: isinstance(value, str),
    ("completion", "choices 0 logprobs"): lambda value: isinstance(value, dict),
    ("completion", "choices 0 logprobs token_logprobs"): lambda value: isinstance(value, list),
    ("completion", "choices 0 logprobs tokens"): lambda value: value in ([], ["text"]),
    ("completion", "choices 0 token_ids"): lambda value: value in ([], [5]),
    ("completion", "choices 0 prompt_logprobs"): lambda value: value in ([], [None], [{}]),
    ("completion", "choices 0 finish_reason"): lambda value: isinstance(value, str),
    ("completion", "usage"): lambda value: isinstance(value, dict),
    ("completion", "usage completion_tokens"): lambda value: value == 5,
    ("chat", "choices 0 message"): lambda value: isinstance(value, dict),
    ("chat", "choices 0 message reasoning_content"): lambda value: isinstance(value, str),
    ("chat", "choices 0 message reasoning"): lambda value: isinstance(value, str),
    ("chat", "choices 0 message content"): lambda value: isinstance(value, str),
    ("chat", "choices 0 logprobs content"): lambda value: isinstance(value, list),
}
VALUES = json.loads(
    """[null, true, false, 5, -5, 2.5, NaN, "text", "4096", {}, {"5": 5}, {"logprob": []},
        [], [null], [true], [5], [-2.5], ["text"], [[]], [{}], [{"5": 5}], [{"5": []}]]"""
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=5,
)


def parsed(kind: str, body: Any) -> dict[str, int | None] | Completion | None:
    answer = Answer(200, body)
    return parse_models(answer) if kind == "models" else parse_completion(answer, is_chat=kind == "chat")


def edited(kind: str, path: str, *values: Any) -> Any:
    """Return a well-formed answer in which one value is replaced by ``values[0]``, or removed without ``values``."""
    body = copy.deepcopy({"models": MODELS, "completion": COMPLETION, "chat": CHAT}[kind])
    *parents, last = path.split()
    at: Any = body
    for name in parents:
        at = at[int(name) if isinstance(at, list) else name]
    last_key = int(last) if isinstance(at, list) else last
    if values:
        at[last_key] = values[0]
    else:
        del at[last_key]
    return body


def test_a_well_formed_answer_is_parsed_completely() -> None:
    assert parsed("models", MODELS) == {"served": 4096}
    assert parsed("completion", COMPLETION) == Completion("pig", (7, 8), True, (-0.5, -0.25), (-1.5,), "stop", 2)
    assert parsed("chat", CHAT) == Completion("a pink pig", ("a pink pig",), False, (-0.5,), None, "stop", 1)


@pytest.mark.parametrize(("kind", "path"), FIELDS)
def test_a_field_of_a_wrong_type_counts_as_omitted(kind: str, path: str) -> None:
    omitted = parsed(kind, edited(kind, path))
    wrong = [value for value in VALUES if not FIELDS[kind, path](value)]
    assert len(wrong) >= len(VALUES) / 2
    for value in wrong:
        assert parsed(kind, edited(kind, path, value)) == omitted, value


INNER = [("models", "data 0"), ("completion", "choices 0"), ("completion", "choices 0 logprobs token_logprobs 0")]
INNER += [("completion", f"choices 0 prompt_logprobs 1{end}") for end in ("", " 5", " 5 logprob")]
INNER += [("chat", f"choices 0 logprobs content 0{end}") for end in ("", " logprob")]


@given(st.sampled_from([*FIELDS, *INNER]), JSON)
def test_any_answer_is_parsed_to_values_of_the_documented_types(field: tuple[str, str], value: Any) -> None:
    kind, path = field
    for body in (value, edited(kind, path, value)):
        result = parsed(kind, body)
        if isinstance(result, dict):
            assert all(type(name) is str and type(longest) in (int, type(None)) for name, longest in result.items())
        elif result is not None:
            assert type(result.text) is type(result.finish_reason) is str
            assert type(result.tokens) is int
            numbers = (*(result.logprobs or ()), *(result.prompt_logprobs or ()))
            assert all(type(number) is float for number in numbers)


# Pictures.


def ask_about_pictures(*faults: str, reads_pictures: bool = True) -> list[Check]:
    with serving(Canned(), *faults) as server:
        subject = ServedSubject(JsonClient(server.root, 10), "tiny", ServeSettings(), None, None)
        return checks.check_pictures(replace(subject, reads_pictures=reads_pictures))


@pytest.mark.parametrize(
    ("faults", "outcome", "seen", "remedy"),
    [
        ((), "pass", "", ""),
        (("blind",), "fail", "ignores pictures", "image_token_id"),
        (("only text",), "fail", "tiny is not a multimodal model", ""),
        (("no chat",), "not offered", "", ""),
    ],
)
def test_a_server_must_read_pictures(faults: tuple[str, ...], outcome: str, seen: str, remedy: str) -> None:
    (check,) = ask_about_pictures(*faults)
    assert check.outcome == outcome
    assert seen in check.seen
    assert remedy in check.remedy
    assert ask_about_pictures(*faults, reads_pictures=False) == []


@pytest.mark.story
@pytest.mark.parametrize(("faults", "outcome"), [((), "pass"), (("blind",), "fail")])
def test_the_kind_of_the_checkpoint_decides_whether_pictures_are_sent(
    tmp_path: Path, faults: tuple[str, ...], outcome: str
) -> None:
    checkpoint = model_in(write("llava", tmp_path / "llava"))
    with serving(Canned(), *faults) as server:
        verdict = smoke_url(RunningServer(server.root), ServeSettings(max_model_len=64), checkpoint=checkpoint)
    assert [check.outcome for check in verdict.checks if check.name == "two pictures"] == [outcome]


def reply(text: str, *logprobs: float) -> Completion:
    return Completion(text, (text,), False, logprobs or None, None, "length", len(logprobs))


@pytest.mark.parametrize(
    ("second", "repeated", "outcome"),
    [
        (reply("b", -1.0, -2.0), reply("a", -1.0, -2.0), "pass"),  # another text
        (reply("a", -1.0, -2.5), reply("a", -1.0, -2.0), "pass"),  # the same text with another likelihood
        (reply("a", -1.0, -2.0), reply("a", -1.0, -2.0), "fail"),
        (reply("a", -1.01, -2.0), reply("a", -1.0, -2.01), "fail"),  # no more than between equal requests
        (reply("a", -1.5, -2.0), reply("a", -1.0, -2.01), "pass"),
        (reply("b", -1.0, -2.0), reply("c", -1.0, -2.0), "not offered"),  # the server is not deterministic
        (reply("a"), reply("a"), "not offered"),  # equal texts without likelihoods
        (reply("b"), reply("a"), "pass"),
    ],
)
def test_answers_about_two_pictures_must_differ(second: Completion, repeated: Completion, outcome: str) -> None:
    first = reply("a", -1.0, -2.0) if second.logprobs else reply("a")
    assert compare_answers(first, second, repeated).outcome == outcome


def test_a_drawn_picture_is_a_valid_png() -> None:
    content = checks.draw_png(lambda x, y: (x, y, 7), 20)
    Image.open(io.BytesIO(content)).verify()
    picture = Image.open(io.BytesIO(content))
    assert picture.size == (20, 20)
    assert all(picture.getpixel((x, y)) == (x, y, 7) for x in range(20) for y in range(20))
