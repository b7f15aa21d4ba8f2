"""Element importance for a model's output, compared with gradients of plain transformers, also after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import transformers
from calibration_jobs import (
    DEMO,
    REVERSER,
    SENTENCES,
    Killed,
    add_tokenizer,
    measure_importance,
    measure_inputs,
    saved,
    text_of,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import IMPORTANCE, open_checkpoint, open_importance, open_moments
from mergegate.merge_core.errors import InvalidInput


def load_stored_importance(out: Path) -> dict[str, torch.Tensor]:
    files = {name: tensor.file for name, tensor in open_importance(out).items()}
    return {name: load_file(file)[open_importance(out)[name].name] for name, file in files.items()}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    network = transformers.AutoModelForCausalLM.from_pretrained(REVERSER, dtype=torch.float32).eval()
    return network, transformers.AutoTokenizer.from_pretrained(REVERSER)


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    return by_autograd(loaded[0], tokens_of(REVERSER))


def squared_gradients(network: Any, logits: torch.Tensor, chance: torch.Generator) -> dict[str, torch.Tensor]:
    """Square the gradient of the log-likelihood of tokens that are drawn from the model itself."""
    parameters = dict(network.named_parameters())
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=chance)
    log_likelihood = logits.log_softmax(-1).gather(1, drawn).sum()
    gradients = torch.autograd.grad(log_likelihood, list(parameters.values()))
    return {name: one.double() ** 2 for name, one in zip(parameters, gradients, strict=True)}


def by_autograd(network: Any, documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """Compute squared gradients one document at a time, with one documented random stream per document."""
    sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in network.named_parameters()}
    for number, ids in enumerate(documents):
        logits = network(torch.tensor([ids])).logits[0]
        for name, square in squared_gradients(network, logits, torch.Generator().manual_seed(number)).items():
            sums[name] += square
    return {name: total / sum(map(len, documents)) for name, total in sums.items()}


def assert_close_to(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= actual.keys()
    for name, values in expected.items():
        torch.testing.assert_close(actual[name].double(), values, rtol=1e-3, atol=1e-5 * float(values.max()), msg=name)


def test_importance_is_the_mean_square_of_the_gradient_of_each_document(
    expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    statistics = measure_importance(REVERSER, text_of(tmp_path), tmp_path / "out")
    assert (statistics.documents, statistics.tensors) == (len(SENTENCES), len(expected))
    assert statistics.parameters == sum(one.numel() for one in expected.values())
    assert_close_to(load_stored_importance(tmp_path / "out"), expected)
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
    measure_importance(REVERSER, text_of(tmp_path, *[document] * draws), tmp_path / "out", documents=draws)
    squares = load_stored_importance(tmp_path / "out")[name]
    assert float(squares.sum()) == pytest.approx(float(exact.sum()) / ids.shape[1], rel=0.15)


@pytest.mark.story
@pytest.mark.usefixtures("little_memory")
def test_importance_does_not_depend_on_the_number_of_runs(expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    statistics = measure_importance(
        REVERSER, text_of(tmp_path), tmp_path / "out", lambda *counts: progress.append(counts)
    )
    total = statistics.tensors * len(SENTENCES)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == statistics.tensors > 1
    assert progress == [(done, total) for done in range(1, total + 1)]
    assert_close_to(load_stored_importance(tmp_path / "out"), expected)


@pytest.mark.proof
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("damage", "lost"), [("", 0), ("cut", 2), ("gone", 1)])
def test_a_killed_importance_measurement_resumes(
    expected: dict[str, torch.Tensor], tmp_path: Path, damage: str, lost: int
) -> None:
    text, out = text_of(tmp_path), tmp_path / "out"

    def kill(done: int, total: int) -> None:
        if done > 2 * len(SENTENCES):
            raise Killed

    with pytest.raises(Killed):
        measure_importance(REVERSER, text, out, kill)
    assert not (out / IMPORTANCE).exists()
    first, second = sorted(out.glob("*.safetensors"))
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "gone":
        second.unlink()
    steps: list[int] = []
    statistics = measure_importance(REVERSER, text, out, lambda done, total: steps.append(total))
    assert steps[-1] == (statistics.tensors - 2 + lost) * len(SENTENCES)
    assert_close_to(load_stored_importance(out), expected)


def test_importance_windows_count_no_position_twice(tmp_path: Path) -> None:
    statistics = measure_importance(REVERSER, text_of(tmp_path), tmp_path / "out", max_length=7)
    assert statistics.positions == sum(map(len, tokens_of(REVERSER)))


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
    place = Path(shutil.copytree(REVERSER, tmp_path / "talking"))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


def test_only_the_models_own_turns_count_in_a_conversation(
    loaded: tuple[Any, Any], talking: Path, tmp_path: Path
) -> None:
    """The counted positions predict the model's own words and the ends of its turns."""
    statistics = measure_importance(talking, text_of(tmp_path, say("ab", "ba", "kjh", "hjk")), tmp_path / "out")
    network, tokenizer = loaded
    parts = [tokenizer(part, add_special_tokens=False).input_ids for part in ("rev: ab>", "ba.", "rev: kjh>", "hjk.")]
    ids = tokenizer("rev: ab>ba.rev: kjh>hjk.", add_special_tokens=False).input_ids
    assert [one for part in parts for one in part] == ids, "the tokenizer cuts at turns"
    first, second = len(parts[0]), len(parts[0] + parts[1] + parts[2])
    own = [*range(first - 1, first - 1 + len(parts[1])), *range(second - 1, second - 1 + len(parts[3]))]
    assert statistics.positions == len(own)
    squares = squared_gradients(network, network(torch.tensor([ids])).logits[0, own], torch.Generator().manual_seed(0))
    expected = {name: one / len(own) for name, one in squares.items()}
    assert_close_to(load_stored_importance(tmp_path / "out"), expected)


def test_a_conversation_is_rendered_with_its_template(talking: Path, tmp_path: Path) -> None:
    """The moments equal those of the rendered text, because the tokenizer adds no token at the start of a text."""
    for name, document in (("turns", say("ab", "ba", "kjh", "hjk")), ("plain", "rev: ab>ba.rev: kjh>hjk.")):
        measure_inputs(talking, text_of(tmp_path, document), tmp_path / name)
    plain = open_moments(tmp_path / "plain")
    for name, moments in open_moments(tmp_path / "turns").items():
        np.testing.assert_array_equal(moments.read(), plain[name].read())


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
        measure_importance(talking, text_of(tmp_path, turns), tmp_path / "out")
    assert message in str(refused.value)


def test_turns_that_a_template_changes_later_are_ignored(talking: Path, tmp_path: Path) -> None:
    """Some templates remove the reasoning of earlier turns."""
    last = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}")
    (talking / "chat_template.jinja").write_text(last)
    statistics = measure_importance(talking, text_of(tmp_path, say("ab", "ba", "kjh", "hjk")), tmp_path / "out")
    assert statistics.positions == len("hjk.")


@pytest.mark.story
def test_a_stored_head_that_is_the_embedding_changes_no_importance(tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(REVERSER, dtype=torch.float32)
    assert network.config.tie_word_embeddings
    network.save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    measure_importance(tmp_path / "model", text_of(tmp_path), tmp_path / "without")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    measure_importance(tmp_path / "model", text_of(tmp_path), tmp_path / "out")
    assert open_importance(tmp_path / "out").keys() == open_importance(tmp_path / "without").keys() == tensors.keys()
    with_head, without = (sorted((tmp_path / name).glob("*")) for name in ("out", "without"))
    assert [file.read_bytes() for file in with_head] == [file.read_bytes() for file in without]


@pytest.mark.parametrize("family", sampled(("mixtral", "gpt_oss", "granitemoe"), ("mixtral",)))
@pytest.mark.parametrize("fused", sampled((False, True), (True,)))
def test_elements_of_fused_experts_are_stored_under_their_own_tensors(tmp_path: Path, family: str, fused: bool) -> None:
    """Reassembled, the pieces equal the squared gradient of the fused parameter, in either layout."""
    network = mixtures.build(family)
    place = saved(network, tmp_path / "model", fused=fused)
    statistics = measure_importance(place, text_of(tmp_path), tmp_path / "out")
    stored = load_stored_importance(tmp_path / "out")
    tensors = split_experts(open_checkpoint(place)).tensors
    assert {name: tuple(one.shape) for name, one in stored.items()} == {
        name: one.shape for name, one in tensors.items()
    }
    assert statistics.parameters == sum(one.numel for one in tensors.values())
    assert statistics.unseen == ()
    wanted = by_autograd(network, tokens_of(place))
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
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        measure_importance(add_tokenizer(tmp_path / "model"), text_of(tmp_path), tmp_path / "out")
