"""The configurations for Accelerate and DeepSpeed: of known keys, and without values that nobody fills in."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

CONFIGS = Path(__file__).parents[2] / "training_scripts" / "configs"
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
