"""What a loss owns is written with every checkpoint and restored on resuming; without the mixin, the loss says so."""

import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.distributed.trainer import LOSS_STATE_FILE
from st_cached_extras.testing.tiny_models import random_sentences, relative_error, tiny_text_model


def make_trainer(loss, model, folder, trainer_class=ReplaySentenceTransformerTrainer, **kwargs):
    dataset = Dataset.from_dict({"anchor": random_sentences(64, 1), "positive": random_sentences(64, 2)})
    if isinstance(loss, dict):
        dataset = {name: dataset for name in loss}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_steps=3,
        max_steps=6,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **kwargs,
    )
    evaluation = dataset if "eval_strategy" in kwargs else None
    return trainer_class(model=model, args=arguments, train_dataset=dataset, eval_dataset=evaluation, loss=loss)


def learnable(model, **kwargs):
    return CachedInfoNCELoss(model, learnable_scale=True, mini_batch_size=3, **kwargs)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    model = tiny_text_model(dropout=0.1)
    whole = learnable(model)
    make_trainer(whole, model, tmp_path / "whole").train()
    resumed_model = tiny_text_model(dropout=0.1, seed=5)
    resumed = learnable(resumed_model)
    make_trainer(resumed, resumed_model, tmp_path / "resumed").train(str(tmp_path / "whole" / "checkpoint-3"))
    assert whole.scale != pytest.approx(20.0)
    assert torch.equal(resumed.objective.log_scale, whole.objective.log_scale)
    assert relative_error(dict(resumed_model.named_parameters()), dict(model.named_parameters())) == 0.0


def test_without_the_mixin_the_scale_starts_anew_and_the_loss_says_so_once(tmp_path, caplog):
    model = tiny_text_model()
    loss = learnable(model)
    with caplog.at_level(logging.WARNING, "st_cached_extras.replay.loss"):
        make_trainer(loss, model, tmp_path, SentenceTransformerTrainer).train()
    messages = [record.message for record in caplog.records if "state of its own" in record.message]
    assert len(messages) == 1 and "log_scale" in messages[0] and "ReplayTrainerMixin" in messages[0]
    assert not (tmp_path / "checkpoint-3" / LOSS_STATE_FILE).exists()


def test_with_the_mixin_and_in_evaluation_nothing_is_said(tmp_path, caplog):
    model = tiny_text_model()
    with caplog.at_level(logging.WARNING, "st_cached_extras.replay.loss"):
        with torch.no_grad():
            learnable(model)([model.preprocess(["w1", "w2"]), model.preprocess(["w3", "w4"])])
        make_trainer(learnable(model), model, tmp_path).train()
    assert "state of its own" not in caplog.text


def test_a_loss_without_state_writes_no_file(tmp_path):
    model = tiny_text_model()
    make_trainer(CachedInfoNCELoss(model), model, tmp_path).train()
    assert not (tmp_path / "checkpoint-3" / LOSS_STATE_FILE).exists()


class Counting(nn.Module):
    """A module with a replay state, inside a model or a loss."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, features):
        self.count += 1
        return features

    def replay_state(self):
        return {"count": torch.tensor([self.count])}

    def load_replay_state(self, state):
        self.count = int(state["count"])


class Teaching(CachedInfoNCELoss):
    """A loss that holds another SentenceTransformer, whose parameters are not the loss's own."""

    def __init__(self, model, teacher):
        super().__init__(model, learnable_scale=True)
        self.teacher = teacher
        self.counter = Counting()


def test_the_walk_finds_wrapped_and_named_losses_and_states_of_the_model_but_no_other_model(tmp_path):
    model = tiny_text_model()
    model[0].counter = Counting()
    losses = {"a": MatryoshkaLoss(model, learnable(model), [16, 8]), "b": Teaching(model, tiny_text_model(seed=1))}
    trainer = make_trainer(losses, model, tmp_path)
    assert set(trainer.loss_state()) == {
        "loss.a.loss.objective.log_scale",
        "loss.b.objective.log_scale",
        "loss.b.counter.replay_state.count",
        "model.0.counter.replay_state.count",
    }
    losses["b"].counter.count = 7
    model[0].counter.count = 9
    state = trainer.loss_state()
    other_model = tiny_text_model()
    other_model[0].counter = Counting()
    other_losses = {
        "a": MatryoshkaLoss(other_model, learnable(other_model, scale=3.0), [16, 8]),
        "b": Teaching(other_model, tiny_text_model(seed=1)),
    }
    other = make_trainer(other_losses, other_model, tmp_path)
    other.load_loss_state(state)
    assert other_losses["b"].counter.count == 7 and other_model[0].counter.count == 9
    assert other_losses["a"].loss.scale == pytest.approx(20.0)


def test_state_of_other_losses_is_refused_and_changes_nothing(tmp_path):
    model = tiny_text_model()
    trainer = make_trainer(loss := learnable(model), model, tmp_path)
    before = loss.objective.log_scale.clone()
    with pytest.raises(ValueError, match=r"unknown are \['loss.stranger'\]"):
        trainer.load_loss_state({**trainer.loss_state(), "loss.stranger": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"log_scale of shape \[2\]"):
        trainer.load_loss_state({"loss.objective.log_scale": torch.zeros(2)})
    assert torch.equal(loss.objective.log_scale, before)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing"])
def test_a_damaged_file_is_refused_and_a_missing_one_is_said(tmp_path, damage, caplog):
    model = tiny_text_model()
    make_trainer(learnable(model), model, tmp_path).train()
    path: Path = tmp_path / "checkpoint-3" / LOSS_STATE_FILE
    assert set(load_file(path)) == {"loss.objective.log_scale"}
    assert not list(path.parent.glob("*.unfinished"))
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "foreign":
        save_file({"weights": torch.zeros(2)}, path)
    else:
        path.unlink()
    trainer = make_trainer(learnable(model), model, tmp_path)
    if damage == "missing":
        trainer.train(str(path.parent))
        assert "written without ReplayTrainerMixin" in caplog.text
        return
    with pytest.raises(ValueError, match=r"not a readable safetensors file|belongs to other losses"):
        trainer.train(str(path.parent))


def test_the_best_models_scale_is_loaded_with_it(tmp_path):
    model = tiny_text_model()
    loss = learnable(model)
    trainer = make_trainer(
        loss,
        model,
        tmp_path,
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint) / LOSS_STATE_FILE)
    assert torch.equal(best["loss.objective.log_scale"], loss.objective.log_scale.detach())
