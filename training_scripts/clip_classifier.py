"""A small judge of generated clips, trained on real ones and never trained against: it reads words off a clip.

What it reads is compared with what was asked for, and the features that it reads from are those under which real and
generated clips are compared by a metric that is not the objective.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


class ClipClassifier(nn.Module):
    """A convolutional network on single frames.

    Args:
        groups: name → words that exclude each other, e.g. {"shape": ["circle", "square"]}; every caption has one of
            each group.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.groups = {name: list(words) for name, words in groups.items()}
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict({name: nn.Linear(64, len(words)) for name, words in self.groups.items()})

    def features(self, clips: Tensor) -> Tensor:
        """[B, T, 3, H, W] in [0, 1] → [B, 64], the mean over frames of what is most pronounced in each."""
        maps = self.body(2 * clips.flatten(0, 1) - 1)
        return maps.amax(dim=(2, 3)).unflatten(0, clips.shape[:2]).mean(1)

    def forward(self, clips: Tensor) -> dict[str, Tensor]:
        """Scores of every group's words, [B, words]."""
        features = self.features(clips)
        return {name: head(features) for name, head in self.heads.items()}

    @torch.no_grad()
    def read(self, clips: Tensor, captions: Sequence[str]) -> Tensor:
        """Whether the word of every group is read as the caption has it, bool [B, groups]."""
        scores = self(clips)
        wanted = word_indices(captions, self.groups)
        return torch.stack([scores[name].argmax(1).cpu() == wanted[name] for name in self.groups], dim=1)


def word_indices(captions: Sequence[str], groups: Mapping[str, Iterable[str]]) -> dict[str, Tensor]:
    """By group, the index of the word of it that each caption has, int64 [captions]."""
    said = [set(caption.lower().split()) for caption in captions]
    return {
        name: torch.tensor([next(i for i, word in enumerate(group) if word in words) for words in said])
        for name, group in groups.items()
    }


def train_classifier(
    clips: Tensor,
    captions: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    *,
    steps: int = 450,
    batch_size: int = 64,
    seed: int = 0,
) -> ClipClassifier:
    """Train a judge on real clips.

    Args:
        clips: uint8 [N, T, 3, H, W].
        captions: one per clip.
        groups: see :class:`ClipClassifier`.
        steps, batch_size, seed: half a minute on one CPU core.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        judge = ClipClassifier(groups)
        targets = word_indices(captions, judge.groups)
        optimizer = torch.optim.Adam(judge.parameters(), 2e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
        for _ in range(steps):
            rows = torch.randint(len(clips), (batch_size,))
            frames = torch.randint(clips.shape[1], (batch_size,))
            pictures = clips[rows, frames][:, None].cpu().float() / 255
            # Noise, so that it reads shapes and not the traces of compression, which generated clips lack.
            scores = judge(pictures + 0.03 * torch.randn_like(pictures))
            loss = sum(F.cross_entropy(scores[name], targets[name][rows]) for name in judge.groups)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return judge.requires_grad_(False).eval()


def save_classifier(judge: ClipClassifier, path: str | os.PathLike) -> None:
    save_file(judge.state_dict(), path)


def load_classifier(path: str | os.PathLike, groups: Mapping[str, Sequence[str]]) -> ClipClassifier:
    judge = ClipClassifier(groups)
    judge.load_state_dict(load_file(path))
    return judge.requires_grad_(False).eval()
