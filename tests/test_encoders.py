"""Frozen encoders: pixels as the encoder's own processor makes them, gradients to the pixels and to nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTImageProcessor,
    DINOv3ViTModel,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    VideoMAEConfig,
    VideoMAEModel,
    VideoMAEVideoProcessor,
    VJEPA2Config,
    VJEPA2Model,
    VJEPA2VideoProcessor,
)

from st_cached_extras.encoders import (
    FrozenEncoder,
    Glimpse,
    Motion,
    PixelPreprocessing,
    PooledPixels,
    RandomConvolution3d,
    SentenceTransformerEncoder,
    load_encoder,
)
from st_cached_extras.encoders.glimpse import centre_of, stands_out
from st_cached_extras.encoders.preprocessing import TOLERANCE
from st_cached_extras.replay import Stage, Staged
from st_cached_extras.testing.tiny_models import FRAMES, PIXELS, tiny_text_model, tiny_video_model
from st_cached_extras.testing.tiny_vlms import (
    tiny_clip,
    tiny_idefics3,
    tiny_llava_onevision,
    tiny_qwen2_vl,
    tiny_smolvlm,
    tiny_vjepa2,
)

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {**SIZE, "image_size": 28, "patch_size": 14}
TEXT = {**SIZE, "vocab_size": 8, "max_position_embeddings": 8}
SQUARE = {"height": 28, "width": 28}


def tiny_encoders():
    """Name → (model, processor, output's N and D of 4 frames, pooled)."""
    torch.manual_seed(0)
    crop = {"size": {"shortest_edge": 32}, "crop_size": SQUARE}
    return {
        "dinov2": (Dinov2Model(Dinov2Config(**VISION)), CLIPImageProcessor(**crop), (4, 16)),
        "dinov3": (
            DINOv3ViTModel(DINOv3ViTConfig(**VISION)),
            DINOv3ViTImageProcessor(size=SQUARE),
            (4, 16),
        ),
        "siglip": (
            SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)),
            SiglipImageProcessor(size=SQUARE),
            (4, 16),
        ),
        "clip": (
            CLIPModel(CLIPConfig(vision_config=VISION, text_config={**TEXT, "eos_token_id": 2}, projection_dim=16)),
            CLIPImageProcessor(**crop),
            (4, 16),
        ),
        "videomae": (
            VideoMAEModel(VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2)),
            VideoMAEVideoProcessor(**crop),
            (2, 16),
        ),
        "vjepa2": (
            VJEPA2Model(
                VJEPA2Config(
                    **{name: SIZE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
                    crop_size=28,
                    patch_size=14,
                    frames_per_clip=4,
                    tubelet_size=2,
                    pred_hidden_size=12,
                    pred_num_attention_heads=2,
                    pred_num_hidden_layers=1,
                )
            ),
            VJEPA2VideoProcessor(crop_size=28),
            (2, 16),
        ),
    }


NAMES = list(tiny_encoders())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    for name, (model, processor, _) in tiny_encoders().items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    return folder


def clips_of(rows=3, frames=4, height=40, width=50):
    """uint8 [rows, frames, height, width, 3], smooth."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.uniform(0, 255, (rows * frames, 3, 5, 6)))
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return smooth.unflatten(0, (rows, frames)).movedim(2, -1).to(torch.uint8).numpy()


def as_floats(clips):
    return torch.from_numpy(clips).movedim(-1, 2).float() / 255


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("height", "width"), [(40, 50), (51, 40), (20, 23)])
def test_pixels_are_those_of_the_processor(name, height, width):
    processor = tiny_encoders()[name][1]
    clips = clips_of(height=height, width=width)
    video = "Video" in type(processor).__name__
    inputs = list(clips) if video else list(clips.reshape(-1, *clips.shape[2:]))
    theirs = next(x for key, x in processor(inputs, return_tensors="pt").items() if key.startswith("pixel_values"))
    ours = PixelPreprocessing.from_processor(processor)(as_floats(clips))
    if not video:
        ours = ours.flatten(0, 1)
    assert ours.shape == theirs.shape
    assert (ours - theirs).square().mean().sqrt() <= TOLERANCE / 2
    assert (ours - theirs).abs().max() <= 0.05  # a pixel of 255 is .018


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("output", ["pooled", "tokens"])
def test_features_are_those_of_the_model_and_gradients_reach_the_pixels(saved, name, output):
    encoder = load_encoder(saved / name, output=output)
    clips = as_floats(clips_of()).requires_grad_()
    features = encoder(clips)
    pixels = encoder.preprocessing(clips.detach())
    model = AutoModel.from_pretrained(saved / name).eval()
    with torch.no_grad():
        if name in ("videomae", "vjepa2"):
            expected = model(pixels).last_hidden_state
            if output == "pooled":
                # Time goes slowest: the first half of the tokens is the first step of two.
                half = expected.shape[1] // 2
                expected = torch.stack([expected[:, :half].mean(1), expected[:, half:].mean(1)], 1)
        else:
            frames = [getattr(model, "vision_model", model)(pixels[:, t]) for t in range(4)]
            if output == "pooled":
                expected = torch.stack([frame.pooler_output for frame in frames], 1)
            else:
                expected = torch.cat([frame.last_hidden_state for frame in frames], 1)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)
    if output == "pooled":
        assert features.shape == (3, *tiny_encoders()[name][2])

    features.square().sum().backward()
    assert clips.grad.isfinite().all()
    assert (clips.grad.flatten(2).abs().sum(-1) > 0).all()  # every frame of every clip
    assert all(p.grad is None and not p.requires_grad for p in encoder.parameters())


def test_the_gradient_of_the_pixels_is_the_derivative(saved):
    encoder = load_encoder(saved / "videomae", dtype=torch.float64)
    clips = as_floats(clips_of(rows=1)).double().requires_grad_()
    direction = torch.randn(clips.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = lambda x: encoder(x).sin().sum()  # noqa: E731
    (gradient,) = torch.autograd.grad(value(clips), clips)
    step = 1e-5 * direction
    with torch.no_grad():
        slope = (value(clips + step) - value(clips - step)) / 2e-5
    assert abs(float((gradient * direction).sum() - slope)) <= 1e-6 * abs(float(slope))


def test_bfloat16_inside_and_float32_outside(saved):
    encoder = load_encoder(saved / "dinov2", dtype=torch.bfloat16)
    clips = as_floats(clips_of()).requires_grad_()
    features = encoder(clips)
    assert next(encoder.parameters()).dtype == torch.bfloat16
    assert features.dtype == torch.float32
    features.sum().backward()
    assert clips.grad.dtype == torch.float32
    exact = load_encoder(saved / "dinov2")(clips.detach())
    assert (features - exact).norm() / exact.norm() < 0.05


def test_an_encoder_takes_the_number_of_frames_that_it_knows(saved):
    encoder = load_encoder(saved / "videomae")
    clips = as_floats(clips_of(frames=8))
    torch.testing.assert_close(encoder(clips), encoder(clips[:, 1::2]))
    assert load_encoder(saved / "vjepa2")(clips).shape == (3, 4, 16)


def test_it_stays_frozen_and_is_not_called_model(saved):
    holder = nn.ModuleDict({"encoder": load_encoder(saved / "dinov2")}).train()
    assert not any(module.training for module in holder["encoder"].modules())
    video = SentenceTransformerEncoder(tiny_video_model())
    held = [name for name, module in video.named_modules() if isinstance(module, SentenceTransformer)]
    assert held == ["encoder"]


@pytest.mark.parametrize("output", ["sentence_embedding", "token_embeddings"])
def test_a_sentence_transformers_video_model_embeds_as_by_its_own_preprocessing(output):
    model = tiny_video_model().eval()
    clips = clips_of(frames=FRAMES, height=PIXELS, width=PIXELS)
    with torch.no_grad():
        expected = model(model.preprocess(list(clips), task="document"))[output]
    encoder = SentenceTransformerEncoder(model, output=output)
    leaf = as_floats(clips).requires_grad_()
    features = encoder(leaf)
    torch.testing.assert_close(features, expected[:, None] if output == "sentence_embedding" else expected)
    features.square().sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_a_sentence_transformers_image_model_embeds_frame_by_frame(tmp_path):
    model, processor, _ = tiny_encoders()["dinov2"]
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    images = SentenceTransformer(str(tmp_path), device="cpu").eval()
    clips = clips_of()
    encoder = SentenceTransformerEncoder(images)
    leaf = as_floats(clips).requires_grad_()
    features = encoder(leaf)
    assert features.shape == (3, 4, 16)
    expected = images.encode([Image.fromarray(frame) for frame in clips[1]], convert_to_tensor=True)
    torch.testing.assert_close(features[1], expected, rtol=0.02, atol=0.02)  # theirs are rounded to 8 bits
    features.square().sum().backward()
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [Glimpse, Motion, PooledPixels, RandomConvolution3d])
def test_encoders_without_weights_to_load_are_deterministic_and_differentiable(make):
    clips = torch.rand(2, 8, 3, 56, 56, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = torch.get_rng_state()
    encoder = make()
    assert torch.equal(torch.get_rng_state(), before)
    features = encoder(clips)
    assert features.ndim == 3
    assert torch.equal(features, make()(clips))
    features.square().sum().backward()
    assert clips.grad.abs().sum() > 0
    assert not torch.equal(features[0], features[1])


def test_random_filters_do_not_see_where_something_is_but_that_it_moves():
    x, y = torch.meshgrid(torch.arange(56), torch.arange(56), indexing="xy")

    def clip(column, row, speed):
        frames = [((x - column - speed * t).abs() < 6) & ((y - row).abs() < 6) for t in range(4)]
        return torch.stack(frames)[:, None].float().expand(-1, 3, -1, -1)

    encoder = RandomConvolution3d()
    here, there, moving = encoder(torch.stack([clip(16, 16, 0), clip(30, 36, 0), clip(16, 16, 2)]))
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
    assert (here - moving).norm() > 0.01 * here.norm()


def sprite_clip(form, column, row, colour, background=(0.1, 0.1, 0.1), size=56):
    """Two like frames with a square or a diamond around (column, row), [2, 3, size, size]."""
    x, y = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")
    across, down = (x - column).abs(), (y - row).abs()
    inside = torch.maximum(across, down) < 7 if form == "square" else across + down < 9
    colours = torch.tensor([colour, background])[:, :, None, None]
    return torch.where(inside, *colours).expand(2, 3, size, size)


def test_a_glimpse_sees_form_and_neither_place_nor_colours():
    red, dim = (0.9, 0.2, 0.2), (0.2, 0.2, 0.3)
    square, elsewhere, dimmed, dark, diamond = Glimpse()(
        torch.stack(
            [
                sprite_clip("square", 16, 16, red),
                sprite_clip("square", 30, 36, red),
                sprite_clip("square", 16, 16, dim),
                sprite_clip("square", 16, 16, (0.1, 0.2, 0.1), (0.8, 0.8, 0.9)),
                sprite_clip("diamond", 16, 16, red),
            ]
        )
    )
    apart = (diamond - square).norm()
    assert square.shape == (1, 256)
    assert (elsewhere - square).norm() < 1e-3 * apart
    assert (dimmed - square).norm() < 0.05 * apart
    assert (dark - square).norm() < 0.05 * apart
    assert apart > 0.2 * square.norm()


def test_a_glimpse_is_the_picture_of_what_stands_out():
    """Against loops over pixels: opacity, centre, box filter, and the grid's points between four pixels."""
    rng = np.random.default_rng(0)
    for cells, window, height, width in [(4, 0.5, 20, 24), (3, 1.0, 17, 15), (6, 0.3, 12, 30)]:
        picture = rng.uniform(0, 0.1, (3, height, width))
        picture[:, 5:9, 6:11] += rng.uniform(0.3, 0.8, (3, 1, 1))
        pixel = {(r, c): picture[:, r, c] for r in range(height) for c in range(width)}
        border = [(r, c) for r, c in pixel if r in (0, height - 1) or c in (0, width - 1)]
        background = np.mean([pixel[at] for at in border], axis=0)
        weight = {at: ((rgb - background) ** 2).sum() + 1e-6 for at, rgb in pixel.items()}
        whole = sum(weight.values())
        row, column = (sum(weight[at] * (at[axis] + 0.5) for at in pixel) / whole for axis in (0, 1))
        colour = sum(weight[at] * (rgb - background) for at, rgb in pixel.items()) / whole
        opacity = {at: (rgb - background) @ colour / (colour @ colour + 1e-3) for at, rgb in pixel.items()}
        pitch = window * min(height, width) / cells
        half = round(pitch / 2)

        def smooth(r, c, opacity=opacity, half=half):
            near = [opacity.get((i, j)) for i in range(r - half, r + half + 1) for j in range(c - half, c + half + 1)]
            return np.mean([x for x in near if x is not None]) if (r, c) in opacity else 0.0

        expected = []
        for i in range(cells):
            for j in range(cells):
                y, x = row + (i - (cells - 1) / 2) * pitch - 0.5, column + (j - (cells - 1) / 2) * pitch - 0.5
                corners = [(int(np.floor(y)) + a, int(np.floor(x)) + b) for a in (0, 1) for b in (0, 1)]
                expected.append(sum(smooth(r, c) * (1 - abs(y - r)) * (1 - abs(x - c)) for r, c in corners))
        found = Glimpse(cells, window=window)(torch.from_numpy(picture)[None, None])
        torch.testing.assert_close(found[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_glimpse_has_the_right_gradient_through_the_centre_too():
    clips = torch.rand(1, 1, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clips[..., 2:5, 3:6] += 1
    assert torch.autograd.gradcheck(Glimpse(3, window=0.7), clips.requires_grad_())


def test_a_glimpse_of_an_empty_picture_is_its_middle_and_has_a_gradient():
    clips = torch.full((1, 2, 3, 28, 28), 0.3).requires_grad_()
    features = Glimpse()(clips)
    features.sum().backward()
    torch.testing.assert_close(features, torch.zeros(1, 1, 256), rtol=0, atol=1e-4)
    assert clips.grad.isfinite().all()
    _, weight = stands_out(clips[0])
    torch.testing.assert_close(centre_of(weight), torch.full((2, 2), 14.0))


def test_motion_is_the_path_of_what_stands_out_and_neither_its_place_nor_its_form():
    steps = torch.tensor([[0, 0], [3, -1], [6, 1], [9, 4]])

    def clip(form, column, row, colour):
        return torch.cat([sprite_clip(form, column + x, row + y, colour)[:1] for x, y in steps.tolist()])

    clips = torch.stack([clip("square", 16, 20, (0.9, 0.2, 0.2)), clip("diamond", 30, 30, (0.2, 0.2, 0.5))])
    path = (steps - steps.float().mean(0)) * 2 / 56
    torch.testing.assert_close(Motion()(clips), path.flatten().expand(2, 1, 8), rtol=0, atol=2e-3)


@pytest.mark.parametrize("wrong", [{"cells": 0}, {"every": 0}, {"window": 0}, {"window": 1.5}])
def test_a_glimpse_of_no_window_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Glimpse(**wrong)


def test_random_filters_differ_by_seed():
    clips = torch.rand(2, 4, 3, 28, 28)
    assert not torch.allclose(RandomConvolution3d(seed=0)(clips), RandomConvolution3d(seed=1)(clips))


def test_as_a_stage_an_encoder_runs_in_its_own_mini_batches(saved):
    encoders = {"dinov2": load_encoder(saved / "dinov2", mini_batch_size=2), "pixels": PooledPixels()}
    rows = []
    encoders["dinov2"].encoder.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    clips = as_floats(clips_of()).requires_grad_()
    features = Staged(Stage("encoders", encoders)).collect(clips).replay()
    sum(x.square().sum() for x in features.values()).backward()
    assert rows == [8, 4, 8, 4]
    expected = as_floats(clips_of()).requires_grad_()
    sum(encoder(expected).square().sum() for encoder in encoders.values()).backward()
    torch.testing.assert_close(clips.grad, expected.grad, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_processor_that_does_something_else_is_refused(tmp_path):
    model, _, _ = tiny_encoders()["dinov2"]
    model.save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 32}, do_center_crop=False, resample=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"PIL's filter 1.*preprocessing=PixelPreprocessing"):
        load_encoder(tmp_path)
    given = PixelPreprocessing(resize=(28, 28))
    assert load_encoder(tmp_path, preprocessing=given)(as_floats(clips_of())).shape == (3, 4, 16)


def test_preprocessing_that_is_not_the_processor_s_is_refused():
    clip = clips_of(rows=1)[0]
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)
    theirs = processor(list(clip), return_tensors="pt")["pixel_values"]
    with pytest.raises(ValueError, match=r"differ by .* more than interpolation explains"):
        PixelPreprocessing((32, 32), (28, 28)).check_against(theirs, clip)
    with pytest.raises(ValueError, match=r"makes \[4, 3, 28, 28\] of a clip"):
        PixelPreprocessing((32, 32)).check_against(theirs, clip)


@pytest.mark.parametrize(
    "clips", [torch.rand(2, 3, 28, 28), torch.rand(2, 4, 28, 28, 3), torch.ones(1, 4, 3, 8, 8, dtype=torch.uint8)]
)
def test_what_is_no_clip_is_refused(clips):
    with pytest.raises(ValueError, match=r"clips must be a floating-point tensor \[clips, frames, 3, height, width\]"):
        PooledPixels()(clips)


def test_features_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"Identity returned \[2, 4, 3, 8, 8\] for 2 clips"):
        FrozenEncoder(nn.Identity())(torch.rand(2, 4, 3, 8, 8))


def test_a_text_model_is_refused():
    with pytest.raises(ValueError, match="neither videos nor images"):
        SentenceTransformerEncoder(tiny_text_model())


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (tiny_qwen2_vl, r"'video' .* makes input_ids .*, pixel_values_videos \[8, 1176\]"),
        (tiny_llava_onevision, r"'video' .* makes input_ids .*, pixel_values_videos \[1, 2, 3, 56, 56\]"),
        (tiny_idefics3, r"'image' .* makes input_ids .*, pixel_values \[2, 1, 3, 56, 56\]"),
        (tiny_smolvlm, r"'video' .* its processor raises ValueError: Asked to sample frames per second"),
    ],
)
def test_a_model_that_takes_more_than_pixels_is_refused_at_once(make, found):
    with pytest.raises(ValueError, match=rf"does not take .*{found}.*Gradients cannot be brought to the pixels"):
        SentenceTransformerEncoder(make())


@pytest.mark.parametrize("make", [tiny_clip, tiny_vjepa2])
def test_a_model_with_a_text_tower_or_of_any_length_is_no_such_model(make):
    features = SentenceTransformerEncoder(make())(as_floats(clips_of()))
    assert features.shape[0] == 3
    assert features.isfinite().all()


def test_an_unknown_output_is_refused(saved):
    with pytest.raises(ValueError, match='output must be "pooled" or "tokens", got \'mean\''):
        load_encoder(saved / "dinov2", output="mean")
