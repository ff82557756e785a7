"""What is recorded is the truth about a step, and recording leaves no trace in it."""

import json
import warnings

import pytest
import torch
from datasets import Dataset
from PIL import Image
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch import nn
from torch.nn.functional import cosine_similarity

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing.tiny_models import random_sentences, relative_error, tiny_text_model
from st_cached_extras.zbp import ZBPBlock, ZBPConfig, ZBPRecorder, apply_zbp, compare_with_exact

CONFIG = ZBPConfig(mode="cd", n_probes=3, eps=1e-3, param_mode="none")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The layer .* is differentiable")
        yield


def small_model(config):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), ZBPBlock(head, config, name="head"), nn.Linear(5, 1))


def test_the_figures_are_those_of_their_definitions():
    model, x = small_model(CONFIG), torch.randn(7, 4)

    def backward():
        model(x).square().sum().backward()

    found = compare_with_exact(model, backward)["2"]

    def gradients_of(mode):
        twin = small_model(CONFIG.replace(mode=mode))
        hidden = twin[1](twin[0](x))
        leaf = hidden.detach().requires_grad_()
        twin[3](twin[2](leaf)).square().sum().backward()
        hidden.backward(leaf.grad)
        return leaf.grad, torch.cat([twin[0].weight.grad.flatten(), twin[0].bias.grad])

    (g, w), (true_g, true_w) = gradients_of("cd"), gradients_of("exact")
    assert found.weight_cosine == pytest.approx(float(cosine_similarity(w, true_w, dim=0)), abs=1e-4)
    assert found.weight_relative_error == pytest.approx(float((w - true_w).norm() / true_w.norm()), rel=1e-4)
    assert found.activation_cosine == pytest.approx(float(cosine_similarity(g, true_g, dim=1).mean()), abs=1e-4)
    batch_mean = cosine_similarity(g.mean(0), true_g.mean(0), dim=0)
    assert found.batch_mean_cosine == pytest.approx(float(batch_mean), abs=1e-4)
    assert found.relative_error == pytest.approx(float((g - true_g).norm() / true_g.norm()), rel=1e-4)
    assert found.exact_norm == pytest.approx(float(true_g.norm()), rel=1e-5)
    assert found.norm_ratio == pytest.approx(float(g.norm() / true_g.norm()), rel=1e-4)
    assert found.queries == 6
    assert 0.2 < found.weight_cosine < 0.999


def test_an_exact_rule_is_found_exact():
    model, x = small_model(CONFIG.replace(mode="exact")), torch.randn(7, 4)
    found = compare_with_exact(model, lambda: model(x).square().sum().backward())["2"]
    assert found.weight_cosine == pytest.approx(1.0, abs=1e-6) and found.relative_error <= 1e-6
    assert found.queries == 0


def test_no_trace_is_left():
    model, x = small_model(CONFIG.replace(eps=None, mode="auto")), torch.randn(7, 4)
    model(x).sum().backward()
    state = model[2].replay_state()
    gradients = [parameter.grad.clone() if parameter.grad is not None else None for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    compare_with_exact(model, lambda: model(nn.functional.dropout(x)).square().sum().backward())
    assert all(torch.equal(state[key], value) for key, value in model[2].replay_state().items())
    assert model[2].zbp.observer is None and model[2].zbp.config.mode == "auto"
    assert torch.equal(torch.get_rng_state(), random_state)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is None if gradient is None else torch.equal(parameter.grad, gradient)


def test_a_layer_without_an_exact_backward_cannot_be_compared():
    block = ZBPBlock(lambda z: z.detach() * 2, CONFIG, name="kernel")
    model = nn.Sequential(nn.Linear(4, 4), block)
    with pytest.raises(ValueError, match="has no graph to its input"):
        compare_with_exact(model, lambda: model(torch.randn(3, 4)).sum().backward())
    assert block.zbp.observer is None


def run(tmp_path, record, mode="cd", loss_class=CachedInfoNCELoss, **loss_arguments):
    model = tiny_text_model(dropout=0.1)
    apply_zbp(model, [-1], CONFIG.replace(mode=mode))
    dataset = Dataset.from_dict({"anchor": random_sentences(64, 1), "positive": random_sentences(64, 2)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=dataset, loss=loss_class(model, mini_batch_size=4, **loss_arguments)
    )
    recorder = ZBPRecorder(trainer, every=2, rows=16) if record else None
    trainer.train()
    return model, trainer, recorder


def test_a_recorded_run_trains_as_an_unrecorded_one_and_logs_every_so_often(tmp_path):
    plain, _, _ = run(tmp_path / "plain", False)
    model, trainer, recorder = run(tmp_path / "recorded", True)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) == 0.0
    assert [entry["step"] for entry in recorder.history] == [1, 3, 5]
    layer = "0.model.encoder.layer.1"
    for entry in recorder.history:
        assert entry["layers"][layer]["queries"] == 2 * 4 * 6  # two columns of four mini-batches
        assert -1 <= entry["layers"][layer]["weight_cosine"] <= 1 and entry["seconds"] > 0
        assert entry["layers"][layer]["exact_norm"] > 0
    logged = [entry for entry in trainer.state.log_history if f"zbp/{layer}/weight_cosine" in entry]
    assert [entry["step"] for entry in logged] == [1, 3, 5] and all("zbp/recorder_seconds" in e for e in logged)
    assert all(f"zbp/{layer}/exact_norm" in entry for entry in logged)

    path = recorder.save(tmp_path / "history.json")
    assert json.loads(path.read_text()) == recorder.history
    with Image.open(recorder.figure(tmp_path / "figures" / "zbp.png")) as picture:
        assert picture.width >= 900
    assert not list(tmp_path.rglob("*.unfinished"))


class Learned(CachedInfoNCELoss):
    """With a parameter, a buffer and components of its own."""

    def __init__(self, model, **kwargs):
        super().__init__(model, **kwargs)
        self.offset = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, sentence_features, labels=None):
        self.seen += 1
        offset = self.offset.square() + 0.1 * self.offset * self.seen
        return {"contrast": super().forward(sentence_features, labels), "offset": offset}


@pytest.mark.parametrize("mode", ["cd", "exact"])
def test_with_a_share_of_rows_both_runs_see_the_same_ones_and_the_training_sees_its_own(tmp_path, mode):
    arguments = {"mode": mode, "loss_class": Learned, "differentiated_samples": 3}
    plain, plain_trainer, _ = run(tmp_path / "plain", False, **arguments)
    model, trainer, recorder = run(tmp_path / "recorded", True, **arguments)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) == 0.0
    assert torch.equal(trainer.loss.offset, plain_trainer.loss.offset) and trainer.loss.offset != 1
    assert torch.equal(trainer.loss.seen, plain_trainer.loss.seen)
    assert trainer.loss.selection_step == plain_trainer.loss.selection_step == 5
    losses = [[entry for entry in each.state.log_history if "contrast" in entry] for each in (trainer, plain_trainer)]
    assert len(losses[0]) == 5
    assert [(e["contrast"], e["offset"]) for e in losses[0]] == [(e["contrast"], e["offset"]) for e in losses[1]]
    for entry in recorder.history:
        [layer] = entry["layers"].values()
        if mode == "exact":
            assert layer["weight_cosine"] == pytest.approx(1.0, abs=1e-6)
            assert layer["weight_relative_error"] <= 1e-5
        else:
            assert layer["weight_cosine"] < 0.999


def test_gradients_that_are_being_accumulated_and_buffers_are_put_back():
    model, x = small_model(CONFIG), torch.randn(7, 4)
    model.insert(1, nn.BatchNorm1d(6))
    model(x).sum().backward()
    gradients = [parameter.grad.clone() if parameter.grad is not None else None for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    compare_with_exact(model, lambda: model(x + 1).square().sum().backward())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is None if gradient is None else torch.equal(parameter.grad, gradient)


def test_wrong_arguments_are_refused(tmp_path):
    _, trainer, _ = run(tmp_path, False)
    with pytest.raises(ValueError, match="every must be a positive number"):
        ZBPRecorder(trainer, every=0)
    with pytest.raises(ValueError, match="nothing to draw yet"):
        ZBPRecorder(trainer).figure(tmp_path / "x.png")
