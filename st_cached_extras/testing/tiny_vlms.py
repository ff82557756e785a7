"""Tiny, randomly initialised image, video and vision-language models built from configs, one per form of input.

What matters here is how each lays out its visual inputs: a grid of patches (Qwen2-VL, 2.5-VL, 3-VL), one tensor per
image (LLaVA-OneVision), one per sample (Idefics3, SmolVLM, CLIP, SigLIP, V-JEPA 2).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from st_cached_extras.testing.tiny_models import WORDS

PATCH = 14
PIXELS = 4 * PATCH
HIDDEN = 16
# One chat template for all: the media as their placeholder tokens, and the text as it stands.
CHAT_TEMPLATE = """{% for message in messages %}<start> {% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE {% elif part['type'] == 'video' %}\
VIDEO {% elif 'text' in part %}{{ part['text'] }} {% endif %}{% endfor %}{% endif %}<end> {% endfor %}"""
_VISION_SPECIALS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
)


def chat_tokenizer(
    padding_side: str = "right", image: str = "", video: str = "", **kwargs: Any
) -> PreTrainedTokenizerFast:
    """One token per word of :data:`WORDS`, the special tokens of chats and media, and any other byte-like character.

    Args:
        padding_side: "left" or "right".
        image: what stands for an image in a rendered chat.
        video: what stands for a video.
        kwargs: more arguments of the tokenizer.
    """
    specials = ["<pad>", "<unk>", "<start>", "<end>", *_VISION_SPECIALS]
    characters = [chr(code) for code in range(33, 127)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*specials, *WORDS, *characters]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
        additional_special_tokens=list(_VISION_SPECIALS),
        padding_side=padding_side,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE.replace("IMAGE", image).replace("VIDEO", video) if image else None,
        **kwargs,
    )


def _text_config(tokenizer: PreTrainedTokenizerFast, **kwargs) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **kwargs,
    }


def _as_model(model: PreTrainedModel, *processing) -> SentenceTransformer:
    with tempfile.TemporaryDirectory() as folder:
        for part in (model.config, *processing):
            part.save_pretrained(folder)
        # Not model.save_pretrained, which writes on the first rank alone.
        save_file(model.state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        transformer = Transformer(folder)
    modules = [transformer]
    if transformer.module_output_name == "token_embeddings":
        modules.append(Pooling(transformer.get_embedding_dimension(), "mean"))
    return SentenceTransformer(modules=modules, device="cpu").train()


# ------------------------------------------------------------------------------------------------ text, rotary


def tiny_rotary_model(padding_side: str = "left", seed: int = 0) -> SentenceTransformer:
    """A Qwen2 text embedder: its positions are relative, so leading padding does not matter."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer(padding_side)
    model = transformers.Qwen2Model(transformers.Qwen2Config(**_text_config(tokenizer)))
    return _as_model(model, tokenizer)


# -------------------------------------------------------------------------------------- grids of visual patches


def _qwen_parts(padding_side: str) -> tuple[PreTrainedTokenizerFast, dict]:
    tokenizer = chat_tokenizer(
        padding_side, "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
    )
    token_ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(token) for name, token in token_ids.items()}


def _qwen_rope(**kwargs) -> dict:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **kwargs}  # sums to head size / 2


def _qwen_model(
    kind: str, config: transformers.PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> SentenceTransformer:
    size = {"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2}
    images = transformers.Qwen2VLImageProcessor(size=size, patch_size=PATCH)
    if kind == "Qwen3VL":
        clip_size = {"shortest_edge": 2 * PIXELS**2, "longest_edge": 64 * PIXELS**2}
        videos = transformers.Qwen3VLVideoProcessor(size=clip_size, patch_size=PATCH, do_sample_frames=False)
    else:
        videos = transformers.Qwen2VLVideoProcessor(size=size, patch_size=PATCH, do_sample_frames=False)
    processor: ProcessorMixin = getattr(transformers, f"{kind}Processor")(
        images, tokenizer, videos, chat_template=tokenizer.chat_template
    )
    return _as_model(transformers.AutoModel.from_config(config), processor)


def tiny_qwen2_vl(padding_side: str = "right", seed: int = 0) -> SentenceTransformer:
    """Qwen2-VL: patches of all images in one tensor, a grid per image, and the same for videos."""
    torch.manual_seed(seed)
    tokenizer, token_ids = _qwen_parts(padding_side)
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    text = _text_config(tokenizer, rope_parameters=_qwen_rope())
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **token_ids)
    return _qwen_model("Qwen2VL", config, tokenizer)


def tiny_qwen2_5_vl(padding_side: str = "right", seed: int = 0) -> SentenceTransformer:
    """Qwen2.5-VL: as Qwen2-VL, with the seconds per temporal patch of every video."""
    torch.manual_seed(seed)
    tokenizer, token_ids = _qwen_parts(padding_side)
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "window_size": PIXELS,
        "fullatt_block_indexes": [0],
        "tokens_per_second": 2,
    }
    text = _text_config(tokenizer, rope_parameters=_qwen_rope())
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **token_ids)
    return _qwen_model("Qwen2_5_VL", config, tokenizer)


def tiny_qwen3_vl(padding_side: str = "right", seed: int = 0) -> SentenceTransformer:
    """Qwen3-VL: as Qwen2-VL, a timestamp before every frame pair, and visual features in the deeper layers too."""
    torch.manual_seed(seed)
    tokenizer, token_ids = _qwen_parts(padding_side)
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = _text_config(tokenizer, head_dim=8, rope_parameters=_qwen_rope(mrope_interleaved=True))
    del text["bos_token_id"]
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **token_ids)
    return _qwen_model("Qwen3VL", config, tokenizer)


# --------------------------------------------------------------------------------- one tensor per image or sample


def tiny_llava_onevision(seed: int = 0) -> SentenceTransformer:
    """LLaVA-OneVision: ``pixel_values`` [images, patches, channels, height, width] and ``image_sizes`` [images, 2]."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer("right", "<image>", "<video>")
    vision = _vision_config("siglip_vision_model")
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text_config(tokenizer)},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[[PIXELS, PIXELS], [PIXELS, 2 * PIXELS]],
        vision_aspect_ratio="anyres_max_9",
    )
    square = {"height": PIXELS, "width": PIXELS}
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=config.image_grid_pinpoints),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=square),
        num_image_tokens=(PIXELS // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    return _as_model(transformers.LlavaOnevisionModel(config), processor)


def tiny_idefics3(seed: int = 0) -> SentenceTransformer:
    """Idefics3 (as SmolVLM): ``pixel_values`` [B, images, channels, height, width], rows with fewer images filled up
    with zeros."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer("right", "<image>", "<video>")
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **_text_config(tokenizer)},
        vision_config=_vision_config("idefics3_vision"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    images = transformers.Idefics3ImageProcessor(
        size={"longest_edge": PIXELS}, max_image_size={"longest_edge": PIXELS}, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=(PIXELS // PATCH // 2) ** 2, chat_template=tokenizer.chat_template
    )
    return _as_model(transformers.Idefics3Model(config), processor)


def tiny_smolvlm(seed: int = 0) -> SentenceTransformer:
    """SmolVLM: as Idefics3, and a video is its frames as so many images, with the time of each in words before it."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer("right", "<image>", "<video>")
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **_text_config(tokenizer)},
        vision_config=_vision_config("smolvlm_vision"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    edge = {"longest_edge": PIXELS}
    processor = transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False),
        tokenizer,
        transformers.SmolVLMVideoProcessor(
            size=edge, max_image_size=edge, video_sampling={"max_frames": 4, "fps": 4, "video_size": edge}
        ),
        image_seq_len=(PIXELS // PATCH // 2) ** 2,
        chat_template=tokenizer.chat_template,
    )
    return _as_model(transformers.SmolVLMModel(config), processor)


def _vision_config(model_type: str) -> dict:
    return {
        "model_type": model_type,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIXELS,
        "patch_size": PATCH,
    }


def tiny_clip(seed: int = 0) -> SentenceTransformer:
    """CLIP: a text tower and an image tower, one image a row."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = 32
    text = {**_text_config(tokenizer), "max_position_embeddings": 32, "projection_dim": HIDDEN, "bos_token_id": 2}
    vision = {**_vision_config("clip_vision_model"), "projection_dim": HIDDEN}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=HIDDEN)
    )
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    return _as_model(model, transformers.CLIPProcessor(images, tokenizer))


def tiny_siglip(seed: int = 0) -> SentenceTransformer:
    """SigLIP: a text tower without a mask, which pools the last position, and an image tower, one image a row."""
    torch.manual_seed(seed)
    # No mask, as from SigLIP's own tokenizer: padding is attended to, and must not be trimmed.
    tokenizer = chat_tokenizer(model_input_names=["input_ids"])
    tokenizer.model_max_length = 32
    text = {**_text_config(tokenizer), "max_position_embeddings": 32, "projection_size": HIDDEN, "bos_token_id": 2}
    vision = {**_vision_config("siglip_vision_model"), "hidden_size": HIDDEN}
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    images = transformers.SiglipImageProcessor(size={"height": PIXELS, "width": PIXELS})
    return _as_model(model, transformers.SiglipProcessor(images, tokenizer))


def tiny_vjepa2(seed: int = 0) -> SentenceTransformer:
    """V-JEPA 2: ``pixel_values_videos`` [B, frames, channels, height, width], without a grid."""
    torch.manual_seed(seed)
    config = transformers.VJEPA2Config(
        patch_size=PATCH,
        crop_size=PIXELS,
        frames_per_clip=4,
        tubelet_size=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_hidden_layers=1,
        mlp_ratio=2,
        pred_hidden_size=16,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        pred_num_mask_tokens=2,
    )
    processor = transformers.VJEPA2VideoProcessor(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}, do_sample_frames=False
    )
    return _as_model(transformers.VJEPA2Model(config), processor)


# ------------------------------------------------------------------------------------------------------ inputs


def image(seed: int, height: int = PIXELS, width: int = PIXELS) -> Image.Image:
    """An RGB image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(seed: int, frames: int = 4) -> np.ndarray:
    """A uint8 clip [frames, height, width, 3] of noise."""
    return np.random.default_rng(seed).integers(0, 256, (frames, PIXELS, PIXELS, 3), dtype=np.uint8)


def message(*parts: str | Image.Image | np.ndarray) -> list[dict]:
    """One row for a vision-language model: a chat message of texts, images and clips, in the order given."""
    kinds: Sequence[tuple[str, type]] = (("text", str), ("image", Image.Image), ("video", np.ndarray))
    content = [{"type": kind, kind: part} for part in parts for kind, type_ in kinds if isinstance(part, type_)]
    return [{"role": "user", "content": content}]
