"""What modes learn is in the checkpoints, and not in the model's own files."""

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from torch import nn

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.distributed.trainer import LOSS_STATE_FILE
from st_cached_extras.testing.tiny_models import random_sentences, relative_error, tiny_text_model
from st_cached_extras.zbp import ErrorTap, ZBPBlock, ZBPConfig, apply_zbp, zbp_blocks

TOP = "0.model.encoder.layer.1"
CONFIGS = {
    "fa": ZBPConfig(mode="fa"),
    "dfa": ZBPConfig(mode="dfa"),
    "opzo": ZBPConfig(mode="opzo", opzo_decay=0.9),
    "surrogate": ZBPConfig(mode="cd", n_probes=2, surrogate=True),
}


def train(model, folder, resume=None, steps=4):
    dataset = Dataset.from_dict({"anchor": random_sentences(32, 1), "positive": random_sentences(32, 2)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        learning_rate=1e-2,
        save_steps=2,
        max_steps=steps,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    loss = CachedInfoNCELoss(model, mini_batch_size=4)
    trainer = ReplaySentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train(None if resume is None else str(resume))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name, tmp_path):
    """With dropout, and a seed of its own in the resumed process."""
    results = []
    for folder, resume, seed in (("whole", None, 0), ("resumed", tmp_path / "whole" / "checkpoint-2", 5)):
        model = tiny_text_model(dropout=0.1, seed=seed)
        apply_zbp(model, [-1], CONFIGS[name])
        train(model, tmp_path / folder, resume)
        results.append((dict(model.named_parameters()), model.get_submodule(TOP).zbp.memory))
    (whole, memory), (resumed, resumed_memory) = results
    assert relative_error(resumed, whole) == 0.0
    assert memory and memory.keys() == resumed_memory.keys()
    assert all(torch.equal(resumed_memory[key], value) for key, value in memory.items())

    checkpoint = tmp_path / "whole" / "checkpoint-4"
    prefix = f"model.{TOP}.replay_state.memory."
    kept = load_file(checkpoint / LOSS_STATE_FILE)
    assert {key for key in kept if key.startswith(prefix)} == {f"{prefix}{key}" for key in memory}
    assert not any("memory" in key for key in load_file(checkpoint / "model.safetensors"))
    plain = SentenceTransformer(str(checkpoint), device="cpu")
    assert zbp_blocks(plain) == {}
    with torch.no_grad():
        assert (plain.encode(["w1 w2"]) == model.eval().encode(["w1 w2"])).all()


def test_a_checkpoint_of_other_layers_is_still_refused(tmp_path):
    model = tiny_text_model()
    apply_zbp(model, [-1], CONFIGS["fa"])
    train(model, tmp_path / "whole", steps=2)
    other = tiny_text_model()
    apply_zbp(other, [0], CONFIGS["fa"])
    with pytest.raises(ValueError, match=r"belongs to other losses: .*layer\.0.*layer\.1"):
        train(other, tmp_path / "other", tmp_path / "whole" / "checkpoint-2")


def test_the_state_of_a_layer_is_a_copy_that_another_goes_on_from():
    def make():
        torch.manual_seed(0)
        config = ZBPConfig(mode="opzo", opzo_decay=0.9, param_mode="none")
        model = nn.Sequential(ZBPBlock(nn.Linear(4, 4), config, name="low"), nn.Linear(4, 2))
        ErrorTap(model)
        return model

    def step(model):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        model(x).square().sum().backward()
        return x.grad

    first, second = make(), make()
    whole = [step(first) for _ in range(2)]
    held = first[0].replay_state()
    state = {key: value.clone() for key, value in held.items()}
    whole += [step(first) for _ in range(2)]
    second[0].load_replay_state(state)
    assert all(torch.equal(step(second), expected) for expected in whole[2:])
    assert not torch.equal(whole[2], whole[1])
    learned = [key for key in state if key.startswith("memory.")]
    assert learned and all(torch.equal(held[key], state[key]) for key in learned), "nothing is changed in place"
