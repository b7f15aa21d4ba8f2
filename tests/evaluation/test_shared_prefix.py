"""Shared prefixes are computed once, and answers equal lm-eval's for every network and way of sharing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from samples import sampled, sampled_rows
from tokenizers import Tokenizer, models, pre_tokenizers

from mergegate.tasks.quality.evaluation.backends import hf_models, shared_prefix
from mergegate.tasks.quality.evaluation.backends.hf_models import RequestTokens, SharedPrefixLM, max_shared_length
from mergegate.tasks.quality.evaluation.backends.shared_prefix import (
    cache_prompts,
    common_start,
    shared_beginning,
    token_rows,
)

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
LONGEST = 96
# Per family: its configuration, and whether its sequences may share a prefix.
FAMILIES: dict[str, tuple[Callable[[], Any], bool]] = {
    "llama": (lambda: tf.LlamaConfig(**MORE), True),
    "qwen2": (lambda: tf.Qwen2Config(**MORE), True),
    "qwen3": (lambda: tf.Qwen3Config(**MORE, head_dim=16), True),
    "mistral": (lambda: tf.MistralConfig(**MORE, sliding_window=24), True),
    "gemma2": (lambda: tf.Gemma2Config(**MORE, head_dim=16, sliding_window=24), True),
    "mixtral": (lambda: tf.MixtralConfig(**MORE, num_local_experts=4), True),
    "gpt2": (lambda: tf.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256), True),
    "neox": (lambda: tf.GPTNeoXConfig(**SIZES, intermediate_size=96, max_position_embeddings=256), True),
    "bloom": (lambda: tf.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4), False),
    "mamba": (lambda: tf.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8), False),
}


# Shared, with a sliding window, and not shared.
COMMON = ("llama", "mistral", "bloom")


def drawn(seed: int, count: int) -> list[RequestTokens]:
    """Draw requests with and without few-shot examples, with short and long answers, some over the context length."""
    rng = random.Random(seed)
    words = range(128)
    examples = rng.choices(words, k=20)
    found: list[RequestTokens] = []
    for number in range(count):
        context = (examples if number % 2 else []) + rng.choices(words, k=rng.randrange(1, 15))
        if number % 7 == 3:
            context = context * 12  # too long, so its beginning is cut off
        same = rng.choices(words, k=3)
        for answer in range(rng.randrange(1, 5)):
            continuation = (same if number % 3 else []) + rng.choices(words, k=rng.choice((1, 1, 2, 6)))
            found.append(((f"question {number}", f"answer {answer}"), context, continuation))
    return found + found[:3]  # duplicate requests must all be answered


def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({f"w{number:03}": number for number in range(128)}, unk_token="w000"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w000", eos_token="w001")


def opened(kind: type[Any], network: Any, **otherwise: Any) -> Any:
    how = {"backend": "causal", "softmax_dtype": "float32", "batch_size": 8, "max_length": LONGEST, **otherwise}
    return kind(pretrained=network, tokenizer=tokenizer(), **how)


def likelihoods(network: Any, requests: list[RequestTokens]) -> tuple[list[tuple[float, bool]], ...]:
    """Return the answers of mergegate's model and of lm-eval's."""
    models = (opened(SharedPrefixLM, network), opened(HFLM, network))
    return tuple(model._loglikelihood_tokens(requests, disable_tqdm=True) for model in models)


@pytest.mark.parametrize(
    ("family", "dtype"),
    sampled_rows(
        [(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)],
        [(family, torch.float32) for family in COMMON],
        pytest.mark.proof,
    ),
    ids=str,
)
def test_answers_are_those_of_whole_sequences(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, may_share = FAMILIES[family]
    network = tf.AutoModelForCausalLM.from_config(make()).to(dtype).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    found, whole = likelihoods(network, drawn(1, 40))
    assert opened(SharedPrefixLM, network)._shares_exactly is may_share
    bound = 1e-4 if dtype is torch.float32 else 0.1
    assert max(abs(one[0] - other[0]) for one, other in zip(found, whole, strict=True)) < bound
    if dtype is torch.float32:
        assert [one[1] for one in found] == [other[1] for other in whole]
    for one, other in zip(found[-3:], found[:3], strict=True):
        assert one == pytest.approx(other, abs=bound)


def test_of_two_equal_logits_only_the_first_is_the_argmax() -> None:
    torch.manual_seed(0)
    network = tf.AutoModelForCausalLM.from_config(FAMILIES["llama"][0]()).eval()
    context = [3, 1, 4]
    with torch.no_grad():
        largest = int(network(torch.tensor([context])).logits[0, -1].argmax())
        first, second = sorted((largest, 127 - largest))
        network.lm_head.weight[127 - largest] = network.lm_head.weight[largest]
    answers, whole = likelihoods(network, [(("", str(token)), context, [token]) for token in (first, second)])
    assert answers[0][0] == answers[1][0] == pytest.approx(whole[0][0], abs=1e-4)
    assert [is_argmax for _, is_argmax in answers] == [is_argmax for _, is_argmax in whole] == [True, False]


def test_a_shared_prefix_is_computed_once() -> None:
    network = tf.AutoModelForCausalLM.from_config(FAMILIES["llama"][0]())
    lm = opened(SharedPrefixLM, network)
    assert lm._shares_exactly
    read = 0

    def counted(*_: Any, input_ids: torch.Tensor, **named: Any) -> Any:
        nonlocal read
        read += input_ids.numel()
        return type(network).forward(network, input_ids=input_ids, **named)

    network.forward = counted
    examples, question = list(range(30, 60)), [1, 2, 3]
    asked = [(("", ""), [*examples, first, *question], [4, 5, answer]) for first in (6, 7) for answer in (8, 9, 10)]
    lm._loglikelihood_tokens(asked, disable_tqdm=True)
    assert read == len(examples) + 2 * (1 + len(question) + 2)


def prompts(seed: int, count: int, same: int = 24, **how: Any) -> list[Instance]:
    """Return prompts that put questions of one to twelve words after the same few-shot examples; some stop early."""
    rng = random.Random(seed)
    examples = [f"w{number:03}" for number in rng.choices(range(2, 128), k=same)]
    found = []
    for number in range(count):
        question = [f"w{word:03}" for word in rng.choices(range(2, 128), k=rng.randrange(1, 13))]
        generation = {"until": ["w007", "w019 w020"], "max_gen_toks": 12, **how}
        found.append(Instance("generate_until", {}, (" ".join(examples + question), generation), number))
    return found


def writer(family: str) -> Any:
    """Build a network whose output changes at each token and for each prompt."""
    torch.manual_seed(0)
    config = FAMILIES[family][0]()
    config.tie_word_embeddings = False  # tied embeddings would repeat the input
    network = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)
    return network


@pytest.mark.parametrize("family", sampled(FAMILIES, COMMON))
def test_generated_answers_equal_lm_evals(family: str) -> None:
    network = writer(family)
    asked = prompts(2, 21)
    theirs = opened(HFLM, network).generate_until(asked, disable_tqdm=True)
    assert len(set(theirs)) > 6  # the test needs different answers
    begun: list[int] = []
    ours = opened(SharedPrefixLM, network)
    assert ours._writes_exactly is FAMILIES[family][1]

    def record_prefixes(_: Any, __: Any, named: dict[str, Any]) -> None:
        if named.keys() == {"input_ids", "past_key_values", "use_cache", "logits_to_keep"}:  # no positions, no mask
            begun.append(named["input_ids"].shape[1])

    network.register_forward_pre_hook(record_prefixes, with_kwargs=True)
    assert ours.generate_until(asked, disable_tqdm=True) == theirs
    windowed = getattr(network.config, "sliding_window", None)
    may_share = FAMILIES[family][1]
    assert begun == ([24, 24, 24] if may_share and not windowed else [])  # batches of 8, 8 and 5


DRAWN = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
# Changes to the default prompts, and the batch size.
ASKED: dict[str, tuple[dict[str, Any], int]] = {
    "nothing in common": ({"same": 0}, 8), "one at a time": ({}, 1), "one token": ({"max_gen_toks": 1}, 8),
    "longer than there is room for": ({"max_gen_toks": 60, "until": []}, 8), "drawn": (DRAWN, 8),
    "drawn from a few": ({**DRAWN, "top_k": 5, "same": 0}, 8), "of several beams": ({"num_beams": 2}, 8),
    "said once": ({"repetition_penalty": 1.3}, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "how"),
    sampled_rows(
        # Grouped heads, one per query, a sliding window.
        [(family, how) for family in ("llama", "gpt2", "mistral") for how in ASKED],
        [("llama", "drawn"), ("llama", "said once"), ("mistral", "nothing in common")],
        pytest.mark.proof,
    ),
)
def test_generated_answers_equal_lm_evals_for_all_settings(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = writer(family)
    monkeypatch.setattr(shared_prefix, "_ROOM", 7)  # small, so it grows several times
    told, together = ASKED[how]
    asked = prompts(3, 11, **told)
    answers = []
    for kind in (HFLM, SharedPrefixLM):
        torch.manual_seed(5)
        answers.append(opened(kind, network, batch_size=together).generate_until(asked, disable_tqdm=True))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3


@pytest.mark.parametrize("seed", sampled(range(20), range(3)))
def test_the_cache_of_packed_prompts_equals_that_of_each_prompt(seed: int) -> None:
    rng = random.Random(seed)
    start = [rng.randrange(2, 9) for _ in range(rng.choice((0, 3, 16, 30)))]
    rows = [start + [rng.randrange(2, 9) for _ in range(rng.randrange(1, 9))] for _ in range(rng.randrange(1, 6))]
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    found = common_start(tokens, mask)
    assert found == 0 or (found >= len(start) and all(row[:found] == rows[0][:found] for row in rows))
    assert found == 0 or all(len(row) > found for row in rows)
    assert (len(start) >= 16 and len(rows) > 1) <= (found > 0)
    torch.manual_seed(0)
    network = tf.AutoModelForCausalLM.from_config(FAMILIES["llama"][0]()).eval()
    kept = cache_prompts(network, tokens, mask, rng.choice((1, 20, 200)))
    assert kept.get_seq_length() == (longest - 1 if kept.layers else 0)
    for number, row in enumerate(rows):
        with torch.no_grad():
            alone = network(torch.tensor([row]), use_cache=True).past_key_values
        for layer, own in zip(kept.layers, alone.layers, strict=False):
            padding = longest - len(row)
            assert not layer.keys[number, :, :padding].any()
            for states, wanted in ((layer.keys, own.keys), (layer.values, own.values)):
                assert torch.allclose(states[number, :, padding:], wanted[0, :, :-1], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None}, None),
        ({"attention_chunk_size": 8192, "sliding_window": 100}, 100),
        ({"text_config": {"sliding_window": 512}}, 512),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 64}, None),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}, "max_position_embeddings": 64}, 64),
    ],
)
def test_the_length_limit_for_sharing_follows_the_configuration(config: dict[str, Any], longest: int | None) -> None:
    assert max_shared_length(config) == (longest or 1 << 31)


@pytest.mark.story
def test_finished_answers_generate_no_further_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    network = writer("llama")
    monkeypatch.setattr(hf_models, "_STEP", 4)
    asked = prompts(4, 16, max_gen_toks=40, until=[f"w{number:03}" for number in range(5, 15)])
    theirs, ours = opened(HFLM, network), opened(SharedPrefixLM, network)
    assert ours._writes_exactly
    steps: list[int] = []

    def count(_: Any, told: Any, named: dict[str, Any]) -> None:
        if (ids := named["input_ids"]).shape[1] == 1:
            steps.append(len(ids))

    network.register_forward_pre_hook(count, with_kwargs=True)
    wanted = theirs.generate_until(asked, disable_tqdm=True)
    taken = sum(steps)
    del steps[:]
    assert ours.generate_until(asked, disable_tqdm=True) == wanted
    written = sum(len(answer.split()) + 4 for answer in wanted)
    assert sum(steps) <= written < taken / 2


# Few distinct tokens, so that sequences share prefixes.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=14)


@settings(max_examples=40)
@given(SEQUENCES, st.integers(1, 40))
def test_every_sequence_is_packed_once_and_attends_only_to_itself(sequences: list[list[int]], length: int) -> None:
    found = []
    for row in token_rows(sequences, length):
        found.extend(row.sequences)
        for number, path in zip(row.sequences, row.paths, strict=True):
            assert row.tokens[path].tolist() == sequences[number]
            assert row.positions[path].tolist() == list(range(len(path)))
            for depth, place in enumerate(path):
                assert sorted(np.flatnonzero(row.sees[place])) == sorted(path[: depth + 1])
    assert sorted(found) == list(range(len(sequences)))


@settings(max_examples=40)
@given(SEQUENCES, st.integers(1, 40))
def test_a_shared_prefix_is_packed_once_within_the_row_length(sequences: list[list[int]], length: int) -> None:
    for row in token_rows(sequences, length):
        beginnings = {tuple(sequences[number][:end]) for number in row.sequences for end in range(1, 13)}
        assert len(row.tokens) == len(beginnings), "one token for each different beginning"
        longest = max(len(sequences[number]) for number in row.sequences)
        assert len(row.tokens) <= max(length, 3 * longest)


@settings(max_examples=40)
@given(SEQUENCES, st.integers(1, 20))
def test_remaining_sequences_are_packed_like_before(sequences: list[list[int]], length: int) -> None:
    """A resumed run therefore computes the same batches."""
    rows = list(token_rows(sequences, length))
    for done in range(1, len(rows)):
        answered = {number for row in rows[:done] for number in row.sequences}
        left = [number for number in range(len(sequences)) if number not in answered]
        again = list(token_rows([sequences[number] for number in left], length))
        assert [[left[number] for number in row.sequences] for row in again] == [list(r.sequences) for r in rows[done:]]


def test_shared_beginning_of_two_sequences() -> None:
    assert [shared_beginning(*pair) for pair in (([1, 2], [1, 3]), ([1], [1, 2]), ([2], [1]))] == [1, 1, 0]
