"""Element importance for a model's output, compared with gradients of plain transformers, also after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import transformers
from calibration_jobs import run_reader
from safetensors.torch import load_file

from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import IMPORTANCE, open_checkpoint, open_importance, open_moments
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo, JournalLocation
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.merge import calibration
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.merge.gradient_statistics import ImportanceStatistics, read_gradients
from mergegate.tasks.merge.input_statistics import read_inputs
from mergegate.tasks.perplexity import HeldOutText, TextSetting, pin_text

DEMO = Path(__file__).resolve().parents[2] / "profiles/demo"
REVERSER = DEMO / "models/reverser"
SENTENCES = ("rev: abcd>dcba", "the red cat sees the old hen.", "rev: kjih>hijk", "copy: aabb>aabb")


def text_of(place: Path, documents: Sequence[str | list[dict[str, str]]]) -> HeldOutText:
    path = place / "text.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return pin_text(path, "text", HashMemo(place / "hashes.db"), TextSetting("the text"), conversations=True)


def read(directory: Path, text: HeldOutText, out: Path, *on_progress: Any, **reading: Any) -> ImportanceStatistics:
    return run_reader(read_gradients, directory, text, out, *on_progress, **reading)


def load_stored_importance(out: Path) -> dict[str, torch.Tensor]:
    files = {name: tensor.file for name, tensor in open_importance(out).items()}
    return {name: load_file(file)[open_importance(out)[name].name] for name, file in files.items()}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    network = transformers.AutoModelForCausalLM.from_pretrained(REVERSER, dtype=torch.float32).eval()
    return network, transformers.AutoTokenizer.from_pretrained(REVERSER)


def by_autograd(loaded: tuple[Any, Any], documents: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Compute squared gradients one document at a time, with one documented random stream per document."""
    network, tokenizer = loaded
    parameters = dict(network.named_parameters())
    sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in parameters.items()}
    positions = 0
    for number, document in enumerate(documents):
        ids = torch.tensor([tokenizer(document).input_ids])
        logits = network(ids).logits[0]
        chance = torch.Generator().manual_seed(number)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=chance)
        log_likelihood = logits.log_softmax(-1).gather(1, drawn).sum()
        for name, gradient in zip(
            parameters, torch.autograd.grad(log_likelihood, list(parameters.values())), strict=True
        ):
            sums[name] += gradient.double() ** 2
        positions += ids.shape[1]
    return {name: total / positions for name, total in sums.items()}


def assert_close_to(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= actual.keys()
    for name, values in expected.items():
        torch.testing.assert_close(actual[name].double(), values, rtol=1e-3, atol=1e-5 * float(values.max()), msg=name)


def test_importance_is_the_mean_square_of_the_gradient_of_each_document(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    statistics = read(REVERSER, text_of(tmp_path, SENTENCES), tmp_path / "out")
    wanted = by_autograd(loaded, SENTENCES)
    assert (statistics.documents, statistics.tensors) == (len(SENTENCES), len(wanted))
    assert statistics.parameters == sum(one.numel() for one in wanted.values())
    assert_close_to(load_stored_importance(tmp_path / "out"), wanted)
    assert set(load_stored_importance(tmp_path / "out")) <= set(open_checkpoint(REVERSER).tensors)


@pytest.mark.story
def test_the_mean_importance_is_the_fisher_information(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """For one context, many draws approach the exact expectation over all tokens that the model could generate."""
    network, tokenizer = loaded
    document, draws = "rev: ab>", 300
    ids = torch.tensor([tokenizer(document).input_ids])
    name, parameter = next((name, one) for name, one in network.named_parameters() if "down_proj" in name)
    log_likelihood = network(ids).logits[0].log_softmax(-1)
    exact = torch.zeros_like(parameter)
    for position in log_likelihood:
        for log_probability in position:
            (gradient,) = torch.autograd.grad(log_probability, parameter, retain_graph=True)
            exact += log_probability.detach().exp() * gradient**2
    read(REVERSER, text_of(tmp_path, (document,) * draws), tmp_path / "out", documents=draws)
    squares = load_stored_importance(tmp_path / "out")[name]
    assert float(squares.sum()) == pytest.approx(float(exact.sum()) / ids.shape[1], rel=0.15)


@pytest.mark.story
def test_importance_does_not_depend_on_the_number_of_runs(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SHARE", 0)
    monkeypatch.setattr(calibration, "_LEAST", 1)
    progress: list[tuple[int, int]] = []
    statistics = read(REVERSER, text_of(tmp_path, SENTENCES), tmp_path / "out", lambda *counts: progress.append(counts))
    total = statistics.tensors * len(SENTENCES)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == statistics.tensors > 1
    assert progress == [(done, total) for done in range(1, total + 1)]
    assert_close_to(load_stored_importance(tmp_path / "out"), by_autograd(loaded, SENTENCES))


class Stopped(BaseException):
    pass


@pytest.mark.story
@pytest.mark.parametrize("damage", ["", "cut", "gone"])
def test_a_killed_importance_measurement_resumes(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(calibration, "_SHARE", 0)
    monkeypatch.setattr(calibration, "_LEAST", 1)
    text, out = text_of(tmp_path, SENTENCES), tmp_path / "out"

    def kill(done: int, total: int) -> None:
        if done > 2 * len(SENTENCES):
            raise Stopped

    with pytest.raises(Stopped):
        read(REVERSER, text, out, kill)
    assert not (out / IMPORTANCE).exists()
    first, second = sorted(out.glob("*.safetensors"))
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "gone":
        second.unlink()
    steps: list[int] = []
    statistics = read(REVERSER, text, out, lambda done, total: steps.append(total))
    lost = {"": 0, "cut": 2, "gone": 1}[damage]
    assert steps[-1] == (statistics.tensors - 2 + lost) * len(SENTENCES)
    assert_close_to(load_stored_importance(out), by_autograd(loaded, SENTENCES))


def test_importance_windows_count_no_position_twice(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    positions = sum(len(loaded[1](one).input_ids) for one in SENTENCES)
    for length in (2, 7):
        statistics = read(REVERSER, text_of(tmp_path, SENTENCES), tmp_path / f"{length}", max_length=length)
        assert statistics.positions == positions


# --- conversations ---

TEMPLATE = (
    "{% for m in messages %}"
    "{{ 'rev: ' if m.role == 'user' else '' }}{{ m.content }}{{ '>' if m.role == 'user' else '.' }}"
    "{% endfor %}"
)


def say(*turns: str) -> list[dict[str, str]]:
    """Return messages in which user and assistant alternate."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(turns)]


@pytest.fixture
def talking(tmp_path: Path) -> Path:
    """Return the reverser with a chat template that matches its training prompts."""
    place = tmp_path / "talking"
    shutil.copytree(REVERSER, place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


def test_only_the_models_own_turns_count_in_a_conversation(
    loaded: tuple[Any, Any], talking: Path, tmp_path: Path
) -> None:
    """The counted positions predict the model's own words and the ends of its turns."""
    turns = ("ab", "ba", "kjh", "hjk")
    statistics = read(talking, text_of(tmp_path, [say(*turns)]), tmp_path / "out")
    network, tokenizer = loaded
    whole = "rev: ab>ba.rev: kjh>hjk."
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    part_ids = [
        tokenizer(part, add_special_tokens=False).input_ids for part in ("rev: ab>", "ba.", "rev: kjh>", "hjk.")
    ]
    assert [one for part in part_ids for one in part] == ids, "the tokenizer cuts at turns"
    first, second = len(part_ids[0]), len(part_ids[0]) + len(part_ids[1]) + len(part_ids[2])
    own = [*range(first - 1, first - 1 + len(part_ids[1])), *range(second - 1, second - 1 + len(part_ids[3]))]
    assert statistics.positions == len(own)
    logits = network(torch.tensor([ids])).logits[0, own]
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0))
    likelihood = logits.log_softmax(-1).gather(1, drawn).sum()
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(likelihood, list(parameters.values()))
    squares = {name: one.double() ** 2 / len(own) for name, one in zip(parameters, gradients, strict=True)}
    assert_close_to(load_stored_importance(tmp_path / "out"), squares)


def test_a_conversation_is_rendered_with_its_template(talking: Path, tmp_path: Path) -> None:
    """The moments equal those of the rendered text, because the tokenizer adds no token at the start of a text."""
    model = Model(name="talking", digest="talking", directory=talking)
    measurements = []
    for name, document in (("turns", say("ab", "ba", "kjh", "hjk")), ("plain", "rev: ab>ba.rev: kjh>hjk.")):
        out = tmp_path / name
        out.mkdir()
        place = JournalLocation(tmp_path / f"{name}.journal", name)
        text = text_of(tmp_path, [document])
        job = CalibrationJob(model, text, CalibrationReading(), "float32", "cpu", out, place)
        read_inputs(job, lambda done, total: None)
        measurements.append({key: one.read() for key, one in open_moments(out).items()})
    for key, moments in measurements[0].items():
        np.testing.assert_array_equal(moments, measurements[1][key])


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        ("", say("ab", "ba"), "chat template: missing"),
        (TEMPLATE, say("ab"), "no text that talking would write"),
        ("{{ raise_exception('no system here') }}", say("ab", "ba"), "no system here"),
        ("{% for %}", say("ab", "ba"), "TemplateSyntaxError"),
    ],
)
def test_a_conversation_that_does_not_fit_is_refused(
    talking: Path, tmp_path: Path, template: str, turns: list[dict[str, str]], message: str
) -> None:
    (talking / "chat_template.jinja").unlink()
    if template:
        (talking / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidInput) as refused:
        read(talking, text_of(tmp_path, [turns]), tmp_path / "out")
    assert message in str(refused.value)


def test_turns_that_a_template_changes_later_are_ignored(talking: Path, tmp_path: Path) -> None:
    """Some templates remove the reasoning of earlier turns."""
    last = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}")
    (talking / "chat_template.jinja").write_text(last)
    statistics = read(talking, text_of(tmp_path, [say("ab", "ba", "kjh", "hjk")]), tmp_path / "out")
    assert statistics.positions == len("hjk.")


def test_a_stored_head_that_is_the_embedding_changes_no_importance(tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(REVERSER, dtype=torch.float32)
    assert network.config.tie_word_embeddings
    network.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((REVERSER / file).read_bytes())
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    read(tmp_path / "model", text_of(tmp_path, SENTENCES), tmp_path / "without")
    from safetensors.torch import save_file

    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    read(tmp_path / "model", text_of(tmp_path, SENTENCES), tmp_path / "out")
    importance = {name: open_importance(tmp_path / name) for name in ("without", "out")}
    assert importance["out"].keys() == importance["without"].keys() == tensors.keys()
    files = {name: sorted((tmp_path / name).glob("*")) for name in importance}
    assert [file.read_bytes() for file in files["out"]] == [file.read_bytes() for file in files["without"]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", pytest.param("granitemoe", marks=pytest.mark.story)])
@pytest.mark.parametrize("fused", [False, True])
def test_elements_of_fused_experts_are_stored_under_their_own_tensors(tmp_path: Path, family: str, fused: bool) -> None:
    """Reassembled, the pieces equal the squared gradient of the fused parameter, in either layout."""
    network, place = mixtures.build(family), tmp_path / "model"
    mixtures.save(network, place, fused=fused)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (place / file).write_bytes((DEMO / "models/base" / file).read_bytes())
    statistics = read(place, text_of(tmp_path, SENTENCES), tmp_path / "out")
    stored = load_stored_importance(tmp_path / "out")
    tensors = split_experts(open_checkpoint(place)).tensors
    assert {name: tuple(one.shape) for name, one in stored.items()} == {
        name: one.shape for name, one in tensors.items()
    }
    assert statistics.parameters == sum(one.numel for one in tensors.values())
    assert statistics.unseen == ()
    wanted = by_autograd((network, transformers.AutoTokenizer.from_pretrained(place)), SENTENCES)
    parts = {"gate_up_proj": ("w1.weight", "w3.weight"), "down_proj": ("w2.weight",)}
    if family == "granitemoe":
        parts = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}
    elif family == "gpt_oss":
        parts = {part: (part,) for name in ("gate_up_proj", "down_proj") for part in (name, f"{name}_bias")}
    for name, values in wanted.items():
        if ".experts." not in name:
            continue
        module, _, part = name.rpartition(".")
        module = module.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else module
        every = [
            torch.cat([stored[f"{module}.{expert}.{own}"] for own in parts[part]]) for expert in range(mixtures.EXPERTS)
        ]
        assert_close_to({name: torch.stack(every)}, {name: values})


def test_a_model_that_predicts_nan_is_refused(tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "models/base", dtype=torch.float32)
    with torch.no_grad():
        network.model.layers[0].input_layernorm.weight[0] = 1e38
        network.model.layers[0].self_attn.q_proj.weight.mul_(1e30)
    network.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((DEMO / "models/base" / file).read_bytes())
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        read(tmp_path / "model", text_of(tmp_path, SENTENCES), tmp_path / "out")
