"""The known traps of video input: what sentence-transformers alone does with each, and what the recipes do.

docs/recipes.md lists them in the same order. Where a test of the first kind fails after an upgrade, the trap is gone,
and so may be the way around it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import VideoMAEConfig, VideoMAEImageProcessor, VideoMAEModel

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.data import (
    DataError,
    check_clips,
    decode_videos,
    drop_broken,
    read_video,
    take_columns,
    write_mp4,
)
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.models import knows_time, load_model, router_mapping
from st_cached_extras.testing.tiny_models import copy_columns, random_clips, tiny_two_tower_model
from st_cached_extras.testing.tiny_vlms import (
    clip,
    image,
    message,
    tiny_qwen2_5_vl,
    tiny_qwen2_vl,
    tiny_qwen3_vl,
    tiny_smolvlm,
)


def captioned(names: tuple[str, str] = ("caption", "video")) -> Dataset:
    return Dataset.from_dict({names[0]: ["w1", "w2 w3"], names[1]: [write_mp4(c) for c in random_clips(2)]})


def train(model: SentenceTransformer, rows: Dataset, folder: Path, **options) -> float:
    """One step of the plain Trainer."""
    options = {"router_mapping": router_mapping(model, rows.column_names[0], rows), **options}
    args = SentenceTransformerTrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, **options
    )
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
    return trainer.train().training_loss


# -------------------------------------------------------------------- 1. seconds per grid are per video, not per row


def columns_with_unequal_rates(model: SentenceTransformer) -> list[dict]:
    rows = [message("w1 w2"), message(clip(0), "w4"), message(clip(1), clip(2), "w5")]
    columns = [model.preprocess(["w1", "w2", "w3"]), model.preprocess(rows)]
    columns[1]["second_per_grid_ts"] = torch.tensor([0.5, 1.0, 3.0])
    return columns


def test_trap_1_stock_slices_the_rates_of_videos_by_row():
    model = tiny_qwen2_5_vl().eval()
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=1)
    with pytest.raises(RuntimeError, match="StopIteration"), torch.no_grad():
        loss(columns_with_unequal_rates(model), None)


@pytest.mark.parametrize("mini_batch_size", [1, 2, 3])
def test_trap_1_ours_takes_the_rates_of_a_rows_own_videos(mini_batch_size):
    model = tiny_qwen2_5_vl().eval()
    columns = columns_with_unequal_rates(model)
    with torch.no_grad():
        whole = MultipleNegativesRankingLoss(model)(copy_columns(columns), None)
        ours = CachedInfoNCELoss(model, mini_batch_size=mini_batch_size)(copy_columns(columns), None)
    assert torch.allclose(ours, whole, atol=1e-5)


# ------------------------------------------------------------------------- 2. a column's name begins with another's


def features_of(rows: Dataset) -> list[dict]:
    """What the Trainer hands to the loss."""
    model = tiny_two_tower_model()
    args = SentenceTransformerTrainingArguments("unused", report_to="none", use_cpu=True, router_mapping={"x": "y"})
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)
    )
    features, _ = trainer.collect_features(trainer.data_collator(list(rows)))
    return features


def test_trap_2_stock_puts_the_inputs_of_video_caption_into_video():
    rows = decode_videos(captioned(("video_caption", "video")))
    clips = features_of(rows)[1]
    assert "caption_input_ids" in clips and "pixel_values" in clips


def test_trap_2_ours_gives_columns_names_that_do_not_collide():
    rows = take_columns(captioned(("video_caption", "video")), {"caption": "video_caption", "video": "video"})
    captions, clips = features_of(decode_videos(rows))
    assert "input_ids" in captions and not any("caption" in key or "input_ids" in key for key in clips)


# ------------------------------------------------------------------------------------ 3. two frames in a bare list


def test_trap_3_stock_takes_two_frames_for_a_pair_of_images():
    features = tiny_qwen2_vl().preprocess([[image(0), image(1)]])
    assert "pixel_values" in features and "pixel_values_videos" not in features


def test_trap_3_ours_refuses_lists_of_images_and_reads_two_frames_as_a_video():
    frames = Dataset.from_dict({"video": [[image(0), image(1)]]})
    with pytest.raises(DataError, match=r"--video_column names a column of lists of images.*write_mp4"):
        check_clips(frames, "video", "--video_column")
    video = read_video(write_mp4(clip(0)), num_frames=2)
    assert "pixel_values_videos" in tiny_qwen2_vl().preprocess([video])


# ---------------------------------------------------------------------- 4. a path that is embedded as if it were text


@pytest.mark.parametrize("name, there", [("clip.webm", True), ("gone.mp4", False)])
def test_trap_4_stock_embeds_the_path_as_text(name, there, tmp_path):
    if there:
        (tmp_path / name).write_bytes(write_mp4(clip(0)))
    model = tiny_two_tower_model().eval()
    assert model.preprocess([str(tmp_path / name)])["modality"] == "text"


def test_trap_4_ours_reads_any_ending_and_names_what_is_missing(tmp_path):
    (tmp_path / "clip.webm").write_bytes(write_mp4(clip(0)))
    paths = [str(tmp_path / "clip.webm"), str(tmp_path / "gone.mp4")]
    rows = decode_videos(Dataset.from_dict({"video": paths}), num_frames=2)
    assert rows[0]["video"].shape == (2, 56, 56, 3)
    with pytest.raises(DataError, match=r"Row 1 .*gone\.mp4"):
        drop_broken(rows, "video")
    assert len(drop_broken(rows, "video", broken="skip", max_broken=1)) == 1


# --------------------------------------------------------------------------------------- 5. a path needs torchcodec


@pytest.fixture
def without_torchcodec(monkeypatch):
    for name in ("torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, None)


def test_trap_5_stock_cannot_read_a_path_without_torchcodec(without_torchcodec, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(write_mp4(random_clips(1)[0]))
    with pytest.raises(ImportError, match="torchcodec"):
        tiny_two_tower_model().preprocess([str(tmp_path / "clip.mp4")])


def test_trap_5_ours_reads_it_with_pyav(without_torchcodec, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(write_mp4(random_clips(1)[0]))
    rows = decode_videos(Dataset.from_dict({"video": [str(tmp_path / "clip.mp4")]}), num_frames=4)
    assert tiny_two_tower_model().preprocess([rows[0]["video"]])["modality"] == "video"


# -------------------------------------------------------------------------------------------- 6. the format of numpy


def test_trap_6_stock_crashes_on_a_dataset_formatted_as_numpy(tmp_path):
    rows = decode_videos(captioned()).with_format("numpy")
    with pytest.raises(ValueError, match="truth value of an array"):
        train(tiny_two_tower_model(), rows, tmp_path)


def test_trap_6_ours_takes_the_columns_without_their_format(tmp_path):
    rows = take_columns(captioned().with_format("numpy"), {"caption": "caption", "video": "video"})
    assert train(tiny_two_tower_model(), decode_videos(rows), tmp_path) > 0


# --------------------------------------------------------------------------- 7. Qwen3-VL wants two frames and a rate


def test_trap_7_stock_fails_on_one_frame_and_guesses_24_frames_a_second():
    model = tiny_qwen3_vl()
    with pytest.raises(ValueError, match="temporal_factor"):
        model.preprocess([clip(0, 1)])
    known = {"fps": 24.0, "total_num_frames": 4, "duration": 4 / 24, "frames_indices": [0, 1, 2, 3]}
    guessed, told = (model.preprocess([value]) for value in (clip(0), {"array": clip(0), "video_metadata": known}))
    assert torch.equal(guessed["input_ids"], told["input_ids"])


def test_trap_7_stock_refuses_a_clip_for_smolvlm_and_ours_tells_it_the_time():
    model = tiny_smolvlm()
    with pytest.raises(ValueError, match="no video metadata was provided"):
        model.preprocess([clip(0)])
    assert knows_time(model)
    rows = Dataset.from_dict({"video": [write_mp4(clip(0, 8), fps=4)]})
    value = decode_videos(rows, num_frames=4, with_metadata=True)[0]["video"]
    assert model.preprocess([value])["pixel_values"].shape[1] == 4  # its processor draws four a second, at most four


@pytest.mark.parametrize("make", [tiny_qwen3_vl, tiny_qwen2_5_vl])
def test_trap_7_ours_tells_when_each_frame_was_and_never_reads_fewer_than_two(make):
    model = make()
    assert knows_time(model)
    slow, fast = (
        decode_videos(Dataset.from_dict({"video": [write_mp4(clip(0, 8), fps=fps)]}), num_frames=4, with_metadata=True)
        for fps in (1, 8)
    )
    slow, fast = (model.preprocess([rows[0]["video"]]) for rows in (slow, fast))
    key = "second_per_grid_ts" if "second_per_grid_ts" in fast else "input_ids"
    assert slow[key].shape != fast[key].shape or not torch.equal(slow[key], fast[key])
    assert len(read_video(write_mp4(clip(0, 8), fps=8), fps=0.1)) == 2


# --------------------------------------------------------------------- 8. a video model with a processor of images


@pytest.fixture
def video_model_with_a_processor_of_images(tmp_path) -> str:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    VideoMAEModel(VideoMAEConfig(image_size=28, patch_size=14, num_frames=4, **sizes)).save_pretrained(tmp_path)
    VideoMAEImageProcessor(size={"shortest_edge": 28}).save_pretrained(tmp_path)
    return str(tmp_path)


def test_trap_8_stock_takes_it_for_a_model_of_images(video_model_with_a_processor_of_images):
    model = SentenceTransformer(video_model_with_a_processor_of_images, device="cpu")
    assert model.modalities == ["image"]


def test_trap_8_ours_says_which_processor_to_save(video_model_with_a_processor_of_images):
    with pytest.raises(UsageError, match=r"does not take text and video, but image\. .*VideoMAEVideoProcessor"):
        load_model(video_model_with_a_processor_of_images, takes="video")


# ---------------------------------------------------------------------- 9. a Router does not know which column is what


def test_trap_9_stock_refuses_a_router_without_a_mapping(tmp_path):
    with pytest.raises(ValueError, match="router_mapping"):
        train(tiny_two_tower_model(), decode_videos(captioned()), tmp_path, router_mapping={})


def test_trap_9_ours_maps_its_own_columns(tmp_path):
    model = tiny_two_tower_model()
    rows = decode_videos(captioned())
    assert train(model, rows, tmp_path, router_mapping=router_mapping(model, "caption", rows)) > 0
