"""The names under which processors return images, videos and audio clips."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

TOKEN_TYPES_KEY = "mm_token_type_ids"


@dataclass(frozen=True)
class Medium:
    """Names under which processors return one kind of media.

    Attributes:
        name: of the modality.
        count_key: items of every row [B].
        pixel_key: the media themselves.
        grid_key: patches in time, height and width of every item [items, 3].
        item_keys: other entries with one per item.
        key_parts: what tells that a key belongs to this medium.
        token_type: the value in ``mm_token_type_ids`` of tokens that stand for it.
    """

    name: str
    count_key: str
    pixel_key: str
    grid_key: str
    item_keys: tuple[str, ...]
    key_parts: tuple[str, ...]
    token_type: int


# In this order: "pixel_values_videos" is of videos, although pixels are of images.
MEDIA = (
    Medium(
        "video",
        "num_videos_per_sample",
        "pixel_values_videos",
        "video_grid_thw",
        # Of Qwen2.5-VL. ST slices it as if it were per row.
        ("second_per_grid_ts", "video_second_per_grid", "video_merge_sizes", "video_position_ids"),
        ("video", "second_per_grid_ts"),
        2,
    ),
    Medium(
        "audio",
        "num_audios_per_sample",
        "input_features",
        "audio_grid_thw",
        ("input_features_mask", "feature_attention_mask", "input_values"),
        ("audio", "input_features", "feature_attention_mask", "input_values"),
        3,
    ),
    Medium(
        "image",
        "num_images_per_sample",
        "pixel_values",
        "image_grid_thw",
        (
            "image_sizes",
            "image_position_ids",
            "image_merge_sizes",
            "pixel_mask",
            "pixel_attention_mask",
            "spatial_shapes",
        ),
        ("image", "pixel", "grid", "patch", "crop", "tile", "aspect_ratio", "spatial_shapes"),
        1,
    ),
)


def medium_of(key: str) -> Medium | None:
    """The medium that an entry belongs to, by its name."""
    return next((medium for medium in MEDIA if any(part in key for part in medium.key_parts)), None)


def media_tokens_of(model: nn.Module) -> dict[str, int]:
    """The token ids that stand for an image, a video or an audio clip, by the configurations within a model."""
    found: dict[str, int] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for medium in MEDIA:
            for name in (f"{medium.name}_token_id", f"{medium.name}_token_index"):
                if isinstance(token := getattr(config, name, None), int):
                    found.setdefault(medium.name, token)
    return found
