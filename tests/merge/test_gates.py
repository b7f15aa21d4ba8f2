"""Router rows computed from prompts, compared with plain transformers on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.merge.gates import GateRequest, PromptPair, compute_rows
from mergegate.tasks.models.checkpoints.model import Model

DEMO = Path(__file__).resolve().parents[2] / "profiles/demo/models"
POSITIVE, NEGATIVE = ("rev: abcd>", "rev: the old "), ("shift: abc",)


def model(name: str = "base") -> Model:
    return Model(name=name, digest=f"{DEMO / name}", directory=DEMO / name)


def rows(mode: str, *pairs: PromptPair) -> np.ndarray:
    found = compute_rows(model(), GateRequest(mode=mode, experts=pairs), "cpu", lambda done, total: None)
    data = np.frombuffer(found.data, "<f4")
    return data.reshape(found.layers, found.rows, found.width).astype(np.float64)


@pytest.fixture(scope="module")
def entering() -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """Return, by prompt, the inputs of each layer, recorded by hooks, and the embeddings of its tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / "base")
    network = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype="auto").eval()
    seen: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}
    for prompt in (*POSITIVE, *NEGATIVE):
        states: list[torch.Tensor] = []

        def note(_: object, given: tuple[Any, ...], keywords: dict[str, Any], into: list[Any] = states) -> None:
            into.append((given[0] if given else keywords["hidden_states"])[0].double())

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in network.model.layers]
        ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
        with torch.no_grad():
            network(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        seen[prompt] = states, network.model.embed_tokens.weight[ids].detach().double()
    return seen


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg"])
@pytest.mark.parametrize("negative", [(), NEGATIVE])
def test_hidden_states_are_taken_at_the_input_of_the_layers(
    entering: dict[str, tuple[list[torch.Tensor], torch.Tensor]], mode: str, negative: tuple[str, ...]
) -> None:
    found = rows(mode, PromptPair(positive=POSITIVE, negative=negative))

    def mean(prompts: tuple[str, ...], layer: int) -> torch.Tensor:
        states = [entering[prompt][0][layer] for prompt in prompts]
        return torch.stack([one.mean(0) if mode == "hidden_avg" else one[-1] for one in states]).mean(0)

    for layer in range(found.shape[0]):
        wanted = mean(POSITIVE, layer) - (mean(negative, layer) if negative else 0)
        np.testing.assert_allclose(found[layer, 0], unit(wanted).numpy(), atol=1e-6)


def test_cheap_embeddings_are_sums_of_embeddings(entering: dict[str, tuple[list[torch.Tensor], torch.Tensor]]) -> None:
    found = rows("cheap_embed", PromptPair(positive=POSITIVE, negative=NEGATIVE))
    sums = {prompt: table.sum(0) for prompt, (_, table) in entering.items()}
    positive = unit(torch.stack([sums[prompt] for prompt in POSITIVE]).mean(0))
    wanted = unit(positive - unit(sums[NEGATIVE[0]]))
    for layer in found:
        np.testing.assert_allclose(layer[0], wanted.numpy(), atol=1e-6)


def test_positive_prompts_decide_alone_if_the_difference_is_zero() -> None:
    """The first layer sees only the last token, so prompts with the same ending are equal there."""
    pair = PromptPair(positive=("rev: abcd>",), negative=("shift: abcd>",))
    both, alone = rows("hidden", pair), rows("hidden", PromptPair(positive=pair.positive, negative=()))
    np.testing.assert_array_equal(both[0], alone[0])
    assert np.abs(both[1] - alone[1]).max() > 0.01
    np.testing.assert_allclose(np.linalg.norm(both, axis=-1), 1, atol=1e-6)


def test_prompts_that_do_not_differ_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the same states"):
        rows("hidden", PromptPair(positive=POSITIVE, negative=POSITIVE))
    with pytest.raises(InvalidInput, match="tokens"):
        rows("hidden", PromptPair(positive=("abc" * 100,), negative=()))


def test_an_expert_without_prompts_has_a_row_of_zeros() -> None:
    found = rows("hidden", PromptPair(positive=POSITIVE, negative=()), PromptPair(positive=(), negative=()))
    assert not found[:, 1].any()


def test_the_result_of_a_step_cannot_be_prompted() -> None:
    text = (
        "name: both\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n---\n"
        "base_model: both\nexperts: [{source_model: a, positive_prompts: x}]\nexperts_per_token: 1\n"
    )
    with pytest.raises(InvalidInput, match="result of a step"):
        load_recipe(text)
