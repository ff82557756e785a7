"""The configurations for Accelerate and DeepSpeed: of known keys, no value that nobody fills in; and launched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "training_scripts" / "configs"
FILLED_BY_THE_TRAINER = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "enabled",
}


def keys_of_auto(config):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from keys_of_auto(value)
        elif value == "auto":
            yield key


@pytest.mark.parametrize("offload", ["", "_offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_configurations_are_of_their_stage_and_leave_open_what_the_trainer_fills_in(stage, offload):
    config = json.loads((CONFIGS / f"zero{stage}{offload}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert ("offload_optimizer" in config["zero_optimization"]) == bool(offload)
    assert set(keys_of_auto(config)) == FILLED_BY_THE_TRAINER


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")])
def test_accelerate_accepts_its_configurations(name, kind):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert str(config.distributed_type).endswith(kind)
    assert name != "fsdp2" or config.fsdp_config["fsdp_version"] == 2


EMBEDDER = [
    *("training_scripts/train_video_embedder.py", "--max_steps", "2", "--per_device_train_batch_size", "8"),
    *("--mini_batch_size", "4", "--train_clips", "32", "--eval_clips", "8", "--bf16", "--use_cpu", "True"),
    *("--dataloader_pin_memory", "False"),
]
GENERATOR = [
    *("training_scripts/train_video_generator.py", "--clips", "32", "--held_out_clips", "16", "--steps", "2"),
    *("--batch_size", "8", "--differentiated", "4", "--mini_batch_size", "2", "--landmarks", "16"),
    *("--judge_steps", "1", "--eval_steps", "2", "--warmup_steps", "1", "--encoders", "pixels", "colours"),
]


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_recipes_train_evaluate_and_save_whole_models_as_their_launcher_asks(engine, tmp_path):
    if engine == "fsdp2":
        asked, configured = ["--config_file", str(CONFIGS / "fsdp2.yaml")], []
    else:
        file = str(CONFIGS / f"{engine}.json")
        asked = ["--use_deepspeed", "--deepspeed_config_file", file, "--mixed_precision", "bf16"]
        configured = ["--accelerator_config", '{"use_configured_state": true}']
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *asked, "--num_processes", "2"),
        *("--main_process_port", "0", "tests/training_scripts/launched.py", engine),
        # In this order, because classes of modules cannot be defined after DeepSpeed has sharded a model on loading.
        *(*GENERATOR, "--output_dir", str(tmp_path / "generator"), "--"),
        *(*EMBEDDER, *configured, "--output_dir", str(tmp_path / "embedder")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for script in ("train_video_embedder", "train_video_generator"):
        assert done.stdout.count(f"{script}.py: wrapped by {engine}") == 2
    model = SentenceTransformer(str(tmp_path / "embedder" / "final"), device="cpu")
    assert all(parameter.numel() and parameter.isfinite().all() for parameter in model.parameters())
    for folder in ("embedder", "generator"):
        assert "| --- |" in (tmp_path / folder / "final" / "README.md").read_text()
