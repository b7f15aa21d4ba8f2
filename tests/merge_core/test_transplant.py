"""A model with a transplanted tokenizer keeps the shared rows and combines them into the new ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family import load, random_tensors, save_checkpoint
from tokenizer_samples import byte_level, with_added, write_tokenizer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.checkpoint.vocabulary import combined_rows, read_tokenizer, sparse_combinations, token_bytes
from mergegate.merge_core.engine import TransplantSettings, transplant_tokenizer
from mergegate.merge_core.errors import InvalidInput

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("needed", [1, 3, 6])
def test_sparse_combinations_of_rows_are_recovered_exactly(needed: int) -> None:
    generator = torch.Generator().manual_seed(needed)
    atoms = torch.randn(200, 64, generator=generator, dtype=torch.float64)
    wanted, numbers, weights = torch.zeros(30, 64, dtype=torch.float64), [], []
    for row in range(30):
        numbers.append(torch.randperm(200, generator=generator)[:needed])
        weights.append(
            torch.randn(needed, generator=generator, dtype=torch.float64).sign()
            * (1 + torch.rand(needed, generator=generator, dtype=torch.float64))
        )
        wanted[row] = weights[-1] @ atoms[numbers[-1]]
    chosen, found = sparse_combinations(wanted, atoms, 16)
    assert float((combined_rows(chosen, found, atoms) - wanted).abs().max()) < 1e-9
    for row in range(30):
        used = {
            int(number): float(weight)
            for number, weight in zip(chosen[row], found[row], strict=True)
            if abs(weight) > 1e-9
        }
        expected = {int(number): float(weight) for number, weight in zip(numbers[row], weights[row], strict=True)}
        assert used.keys() == expected.keys()
        assert all(abs(used[number] - expected[number]) < 1e-9 for number in used)


def pursuit(wanted: np.ndarray, atoms: np.ndarray, k: int) -> np.ndarray:
    """Return the residual of textbook orthogonal matching pursuit, with one least-squares fit per step."""
    left, chosen = wanted.copy(), []
    unit = atoms / np.linalg.norm(atoms, axis=1, keepdims=True)
    for _ in range(k):
        match = np.abs(unit @ left)
        match[chosen] = -1
        chosen.append(int(match.argmax()))
        weights, *_ = np.linalg.lstsq(atoms[chosen].T, wanted, rcond=None)
        left = wanted - weights @ atoms[chosen]
    return left


def test_batched_pursuit_equals_the_textbook_algorithm() -> None:
    generator = torch.Generator().manual_seed(0)
    atoms, wanted = (torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in (80, 10))
    chosen, weights = sparse_combinations(wanted, atoms, 8)
    left = (wanted - combined_rows(chosen, weights, atoms)).numpy()
    for row in range(10):
        np.testing.assert_allclose(left[row], pursuit(wanted[row].numpy(), atoms.numpy(), 8), atol=1e-10)


def test_zero_rows_and_equal_atoms_are_handled() -> None:
    atoms = torch.eye(4, 6).repeat(2, 1)
    atoms = torch.cat([atoms, torch.zeros(2, 6)])
    wanted = torch.cat([torch.zeros(1, 6), torch.tensor([[1.0, 2, 0, 0, 0, 0]]), torch.tensor([[0.0, 0, 0, 0, 5, 0]])])
    chosen, weights = sparse_combinations(wanted, atoms, 64)
    made = combined_rows(chosen, weights, atoms)
    assert torch.isfinite(weights).all()
    torch.testing.assert_close(made, torch.tensor([[0.0] * 6, [1, 2, 0, 0, 0, 0], [0.0] * 6]))


def planted(root: Path, *, tied: bool = False) -> tuple[Tokenizer, Tokenizer]:
    """Save a model and a donor with linear images of the same meanings. The donor has tokens that the model lacks."""
    first, second = byte_level(300), with_added(byte_level(330), "<|call|>")
    texts = sorted({*first.get_vocab(), *second.get_vocab()})
    generator = torch.Generator().manual_seed(0)
    meaning = dict(zip(texts, torch.randn(len(texts), 8, generator=generator), strict=True))
    for name, one, seed in (("model", first, 1), ("donor", second, 2)):
        size = 1 + max(one.get_vocab().values())
        tensors = random_tensors(seed, tokens=size)
        for table in (EMBED, HEAD):
            picture = torch.randn(8, 12, generator=generator)
            for token, number in one.get_vocab().items():
                tensors[table][number] = meaning[token] @ picture
        if tied:
            del tensors[HEAD]
        ids = {"eos_token_id": one.token_to_id("</s>"), "bos_token_id": one.token_to_id("<s>")}
        place = save_checkpoint(root / name, tensors, config=ids)
        write_tokenizer(place, one)
        (place / "generation_config.json").write_text(json.dumps({**ids, "top_p": seed / 10}))
    return first, second


@pytest.mark.parametrize("tied", [False, True])
def test_combinations_transfer_between_spaces(tmp_path: Path, tied: bool) -> None:
    first, second = planted(tmp_path, tied=tied)
    donor_rows = load(tmp_path / "donor")[EMBED]
    opened = [open_checkpoint(tmp_path / name) for name in ("model", "donor")]
    made = transplant_tokenizer(*opened, tmp_path / "out", tmp_path / "rows", TransplantSettings(k=12))
    out, before = load(tmp_path / "out"), load(tmp_path / "model")
    assert set(out) == set(before)
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).get_vocab() == second.get_vocab()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == len(out[EMBED]) == len(donor_rows)
    assert config["eos_token_id"] == second.token_to_id("</s>")
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {
        "eos_token_id": second.token_to_id("</s>"),
        "bos_token_id": second.token_to_id("<s>"),
        "top_p": 0.1,
    }
    for table in (EMBED,) if tied else (EMBED, HEAD):
        assert made.errors[table] < 1e-5  # The meanings have eight dimensions, so nine rows determine everything.
        for token, number in second.get_vocab().items():
            if (row := first.token_to_id(token)) is not None:
                assert np.array_equal(out[table][number], before[table][row]), token
    # The new rows map the donor's meaning into the model's space.
    shared = [token for token in second.get_vocab() if first.token_to_id(token) is not None]
    theirs = np.array([donor_rows[second.token_to_id(token)] for token in shared])
    mine = np.array([before[EMBED][first.token_to_id(token)] for token in shared])
    bridge, *_ = np.linalg.lstsq(theirs, mine, rcond=1e-6)
    for token, number in second.get_vocab().items():
        np.testing.assert_allclose(out[EMBED][number], donor_rows[number] @ bridge, atol=2e-3, err_msg=token)
    for name in before:
        if name not in (EMBED, HEAD):
            assert np.array_equal(out[name], before[name])


def test_the_command_writes_a_complete_checkpoint_or_nothing(tmp_path: Path) -> None:
    planted(tmp_path)
    arguments = ["transplant-tokenizer", str(tmp_path / "model"), str(tmp_path / "donor"), str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--method", "mean", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens"] == 332
    assert told["shared"] == 301
    out, before = load(tmp_path / "out")[EMBED], load(tmp_path / "model")[EMBED]
    np.testing.assert_allclose(out[-1], before.mean(0), atol=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "donor", "out"}
    for more, words in (([], "it exists"), (["--method", "copy"], "'omp', 'mean'"), (["-k", "0"], "equal to 1")):
        place = arguments[-1] if not more else str(tmp_path / "other")
        result = CliRunner().invoke(app, [*arguments[:3], place, *more])
        assert result.exit_code == 2
        assert words in result.output
    (tmp_path / "donor/tokenizer.json").unlink()
    result = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "other")])
    assert result.exit_code == 2
    assert not (tmp_path / "other").exists()


def test_models_without_common_tokens_are_refused(tmp_path: Path) -> None:
    planted(tmp_path)
    content = {"model": {"type": "WordLevel", "vocab": {"one": 0}}}
    write_tokenizer(tmp_path / "donor", content)
    with pytest.raises(InvalidInput, match="no token"):
        transplant_tokenizer(
            *(open_checkpoint(tmp_path / n) for n in ("model", "donor")), tmp_path / "out", tmp_path / "rows"
        )


def test_tokens_with_the_same_bytes_are_equal(tmp_path: Path) -> None:
    pieces = {"model": {"type": "BPE", "vocab": {"<unk>": 0, "<0xFF>": 1, "▁the": 2, "é": 3}, "merges": []}}
    pieces["added_tokens"] = [{"id": 0, "content": "<unk>", "special": True}]
    for name, one in (("a", byte_level()), ("b", pieces)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, one)
    a, b = (read_tokenizer(tmp_path / name) for name in "ab")
    assert a is not None
    assert b is not None
    mine, theirs = token_bytes(a), token_bytes(b)
    assert theirs == {b"\0<unk>": 0, b"\xff": 1, b" the": 2, "é".encode(): 3}
    assert mine[b" the"] == a.ids["Ġthe"]
    assert all(mine[bytes([byte])] < 340 for byte in range(256))
    assert mine[b"\0<s>"] == a.ids["<s>"]
