"""The generator of `train_video_generator.py`: captions and noise in, short clips out; 0.25 million parameters.

A clip is painted in layers: a sprite moves along a path over a plain background. A network draws the sprite and
chooses path and colours; what a renderer then does with them has no parameters. Nothing tells the network which word
means what: that is what distribution matching has to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn import functional as F

Scene = dict[str, Tensor]


class TinyVideoGenerator(
    nn.Module, PyTorchModelHubMixin, library_name="st-cached-extras", tags=["text-to-video", "st-cached-extras"]
):
    """Draws a scene from a caption's words and noise; :func:`render` makes a clip of it.

    Args:
        words: the vocabulary. A caption's condition says which of them are in it.
        frames: of a clip.
        side: height and width of a frame in pixels.
        noise_size: numbers of noise per clip.
        width: of the hidden layers.
        sprite_side: height and width of the sprite in pixels, a multiple of 4.

    Example:
        >>> generator = TinyVideoGenerator.from_pretrained("output/video-generator/final")
        >>> clips = generator.generate(["a large red circle moving left slowly"], seed=0)
    """

    def __init__(
        self,
        words: Sequence[str],
        frames: int = 8,
        side: int = 56,
        noise_size: int = 16,
        width: int = 128,
        sprite_side: int = 28,
    ) -> None:
        super().__init__()
        self.words = list(words)
        self.frames, self.side, self.noise_size, self.sprite_side = frames, side, noise_size, sprite_side
        count = len(self.words)
        self.trunk = nn.Sequential(nn.Linear(count + noise_size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.motion = nn.Linear(width, 4)  # where the middle of the path is, and half of the way
        self.wobble = nn.Linear(width, 2 * frames)  # what is not steady about the path
        self.background = nn.Linear(width, 3)
        self.colour = nn.Linear(count, 3)
        small = sprite_side // 4
        self.sprite = nn.Sequential(
            nn.Linear(count, width),
            nn.SiLU(),
            nn.Linear(width, 32 * small * small),
            nn.Unflatten(1, (32, small, small)),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(16, 8, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 1, 3, padding=1),
        )
        # Every sprite begins as a soft disc in the middle of its square.
        from_middle = torch.linspace(-1, 1, sprite_side).square()
        disc = 3 - 10 * (from_middle[:, None] + from_middle)  # [s, s], before the sigmoid
        self.register_buffer("disc", disc, persistent=False)

    def forward(self, inputs: Mapping[str, Tensor]) -> Scene:
        """A scene per row.

        Args:
            inputs: "noise" [B, noise_size] and "condition" [B, words].

        Returns:
            "sprite", opacity [B, 1, s, s]; "path", the sprite's centre in every frame, (x, y) in half sides from the
            middle [B, T, 2]; "colour" and "background", RGB in [0, 1], [B, 3] each.
        """
        condition = inputs["condition"]
        hidden = self.trunk(torch.cat([inputs["noise"], condition], dim=1))
        middle, way = self.motion(hidden)[:, None].chunk(2, dim=-1)  # [B, 1, 2]
        time = torch.linspace(-1, 1, self.frames, device=condition.device)[:, None]
        wobble = self.wobble(hidden).unflatten(1, (self.frames, 2))
        return {
            "sprite": (self.sprite(condition) + self.disc).sigmoid(),
            "path": (middle + time * way + 0.1 * wobble).tanh(),  # a sprite that has left the frame is lost
            # Adam moves a weight by the learning rate a step, and a bright colour is far from the grey of 0.
            "colour": (8 * self.colour(condition)).sigmoid(),
            "background": (self.background(hidden) - 2).sigmoid(),
        }

    def render(self, scene: Mapping[str, Tensor]) -> Tensor:
        """Clips [B, T, 3, side, side] in [0, 1] of scenes."""
        return render(scene, self.side)

    def condition(self, captions: Sequence[str]) -> Tensor:
        """Which of the vocabulary's words are in each caption, [captions, words] of 0 and 1.

        Raises:
            ValueError: a caption has none of them.
        """
        said = [set(caption.lower().split()) for caption in captions]
        if strange := [caption for caption, words in zip(captions, said, strict=True) if not words & set(self.words)]:
            raise ValueError(f"captions: no word of {strange[0]!r} is known. Use some of: {', '.join(self.words)}.")
        return torch.tensor([[float(word in words) for word in self.words] for words in said])

    @torch.no_grad()
    def generate(self, captions: Sequence[str], seed: int = 0) -> Tensor:
        """A clip per caption, uint8 [captions, T, side, side, 3]. The same captions and seed give the same clips."""
        noise = torch.randn(len(captions), self.noise_size, generator=torch.Generator().manual_seed(seed))
        device = self.motion.weight.device
        inputs = {"noise": noise.to(device), "condition": self.condition(captions).to(device)}
        clips = self.render(self(inputs))
        return (255 * clips).round().to(torch.uint8).movedim(2, -1).cpu()


def render(scene: Mapping[str, Tensor], side: int) -> Tensor:
    """Place each sprite along its path, over the background: [B, T, 3, side, side] in [0, 1]."""
    sprite, path = scene["sprite"], scene["path"]
    batch, frames, _ = path.shape
    # For every pixel of a frame, where it lies on the sprite, in [-1, 1]; outside of that, nothing is painted.
    pixels = (torch.arange(side, device=path.device, dtype=path.dtype) + 0.5) * (2 / side) - 1
    place = (pixels - path[..., None]) * (side / sprite.shape[-1])  # [B, T, 2, side]
    x, y = place.unbind(2)
    grid = torch.stack(torch.broadcast_tensors(x[:, :, None, :], y[:, :, :, None]), dim=-1).flatten(0, 1)
    layers = sprite.expand(batch, frames, *sprite.shape[2:]).flatten(0, 1)[:, None]  # [B·T, 1, s, s]
    opacity = F.grid_sample(layers, grid, align_corners=False).unflatten(0, (batch, frames))  # [B, T, 1, side, side]
    colour, background = (scene[name][:, None, :, None, None] for name in ("colour", "background"))
    return background + opacity * (colour - background)


def vocabulary(captions: Sequence[str]) -> list[str]:
    """The words that tell captions apart: all that are in some and not in others."""
    said = [set(caption.lower().split()) for caption in captions]
    return sorted(set.union(*said) - set.intersection(*said))
