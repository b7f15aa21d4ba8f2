"""Clients of the demo family over rounds: each goes a step from the last release towards its skill, or elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from demo_project import PROFILES
from safetensors.torch import load_file, save_file

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter

MODELS = PROFILES / "demo/models"
STEP = 0.35  # of a fine-tune's way
HONEST = {"ada": "reverser", "ben": "reverser", "cleo": "shifter", "dan": "shifter"}
WEIGHTS = "model.safetensors"


def _wide(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(place / WEIGHTS).items()}


class Clients:
    """Where clients leave what they trained.

    Args:
        place: Directory of the clients.
        alike: Each honest one has documents of every skill, else of its own alone.
    """

    def __init__(self, place: Path, *, alike: bool = False) -> None:
        self.place = place
        base = _wide(MODELS / "base")
        self._ways = {skill: {n: t - base[n] for n, t in _wide(MODELS / skill).items()} for skill in HONEST.values()}
        self._alike = alike
        self._draw = torch.Generator().manual_seed(0)

    def train(self, name: str, begin: Path) -> None:
        """An honest client's step from what is released, with a little noise of its own."""
        way = self._between if self._alike else self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * self._noisy(one) for key, one in way.items()})

    def approach(self, name: str, begin: Path) -> None:
        """An honest client that learns less the more of its skill is there: a step of the way that is left."""
        base, here = _wide(MODELS / "base"), _wide(begin)
        skills = list(self._ways)
        ways = torch.stack([torch.cat([way.flatten() for way in self._ways[skill].values()]) for skill in skills], 1)
        gone = torch.cat([(here[key] - base[key]).flatten() for key in base])
        share = float(torch.linalg.lstsq(ways, gone[:, None]).solution[skills.index(HONEST[name])])
        way = self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * (1 - share) * self._noisy(one) for key, one in way.items()})

    def turn(self, name: str, begin: Path, times: float) -> None:
        """A client that goes where all honest ones come from, and so many times as far."""
        self._save(name, begin, {key: -times * STEP * one for key, one in self._between.items()})

    def confuse(self, name: str, begin: Path, times: float) -> None:
        """A client that holds noise, so many times as large as a step."""
        steps = self._ways["reverser"]
        noise = {key: torch.randn(one.shape, generator=self._draw) for key, one in steps.items()}
        self._save(
            name, begin, {key: times * STEP * one.square().mean().sqrt() * noise[key] for key, one in steps.items()}
        )

    def damage(self, name: str, begin: Path) -> None:
        """A client whose training ended in NaN."""
        self._save(
            name, begin, {key: torch.full_like(one, float("nan")) for key, one in self._ways["reverser"].items()}
        )

    def as_adapter(self, name: str, begin: Path) -> Path:
        """What a client has trained as a LoRA adapter on what is released, in place of the whole checkpoint."""
        place = self.place / name
        tuned, base = open_checkpoint(place), open_checkpoint(begin)
        made = extract_adapter(tuned, base, str(begin), ExtractionSettings(rank=24, dtype="bfloat16"))
        shutil.rmtree(place)
        place.mkdir()
        write_adapter(made.adapter, place)
        shutil.copy(MODELS / "base/README.md", place)
        return place

    @property
    def _between(self) -> dict[str, torch.Tensor]:
        """The way to both skills: what the honest ones go together."""
        one, other = (self._ways[skill] for skill in ("reverser", "shifter"))
        return {key: (one[key] + other[key]) / 2 for key in one}

    def _noisy(self, change: torch.Tensor) -> torch.Tensor:
        return change + 0.1 * change.square().mean().sqrt() * torch.randn(change.shape, generator=self._draw)

    def _save(self, name: str, begin: Path, change: dict[str, torch.Tensor]) -> None:
        out = self.place / name
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(MODELS / "base", out)
        made = {key: (tensor + change[key]).bfloat16() for key, tensor in _wide(begin).items()}
        save_file(made, out / WEIGHTS, {"format": "pt"})
