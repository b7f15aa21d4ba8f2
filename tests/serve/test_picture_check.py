"""The smoke test asks about two pictures, and refuses a server that ignores or rejects them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from openai_server import Canned, serving
from PIL import Image
from tiny_kinds import write
from variants import model_in

from mergegate.tasks.serve.checks import ServedSubject
from mergegate.tasks.serve.client import Client, Completion
from mergegate.tasks.serve.picture_check import check_pictures, compare_answers, draw_png
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.smoke import RunningServer, smoke_url
from mergegate.tasks.serve.verdict import Check


def ask(*faults: str, reads_pictures: bool = True) -> list[Check]:
    with serving(Canned(), *faults) as server:
        subject = ServedSubject(Client(server.root, 10), "tiny", ServeSettings(), None, None)
        return check_pictures(replace(subject, reads_pictures=reads_pictures))


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
    (check,) = ask(*faults)
    assert check.outcome == outcome
    assert seen in check.seen
    assert remedy in check.remedy
    assert ask(*faults, reads_pictures=False) == []


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
    content = draw_png(lambda x, y: (x, y, 7), 20)
    Image.open(io.BytesIO(content)).verify()
    picture = Image.open(io.BytesIO(content))
    assert picture.size == (20, 20)
    assert all(picture.getpixel((x, y)) == (x, y, 7) for x in range(20) for y in range(20))
