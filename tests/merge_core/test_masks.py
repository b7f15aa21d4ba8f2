"""The random generator is Philox, and a mask depends only on its key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergegate.merge_core.methods.masks import mask_key, mask_words, philox, threshold

CPU = torch.device("cpu")


# Known answers of philox2x32-10 from the Random123 distribution (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_the_generator_matches_the_published_answers(
    counter: tuple[int, int], key: int, answer: tuple[int, int]
) -> None:
    low, high = philox(torch.tensor([counter[0]]), torch.tensor([counter[1]]), key)
    assert (int(low), int(high)) == answer


@pytest.mark.parametrize("start", [0, 1, 7, 2**32 - 3])
def test_random_words_do_not_depend_on_where_a_block_starts(start: int) -> None:
    key = mask_key(1, "layer", 0)
    whole = mask_words(key, start, 100, CPU)
    parts = [mask_words(key, start + first, count, CPU) for first, count in ((0, 33), (33, 1), (34, 66))]
    assert torch.equal(torch.cat(parts), whole)


def test_the_fused_kernel_draws_the_same_words() -> None:
    from mergegate.merge_core.methods import kernels

    key = mask_key(1, "layer", 0)
    for start, count in ((0, 64), (5, 33), (2**33 + 2, 10)):
        out = np.zeros(count + 2, np.uint32)
        kernels.mask_words(key[0], key[1], start, count, out)
        assert out[start % 2 :][:count].tolist() == mask_words(key, start, count, CPU).tolist()


def test_seed_tensor_and_model_all_change_the_key() -> None:
    assert len({mask_key(seed, name, model) for seed in (0, 1) for name in "ab" for model in (0, 1)}) == 8


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_the_density(density: float) -> None:
    count = 200_000
    kept = (mask_words(mask_key(3, "x", 1), 0, count, CPU) < threshold(density)).double()
    # Five standard deviations of a binomial proportion.
    assert abs(float(kept.mean()) - density) < 5 * (density * (1 - density) / count) ** 0.5
    neighbours = float(torch.corrcoef(torch.stack((kept[:-1], kept[1:])))[0, 1])
    assert abs(neighbours) < 5 / count**0.5
