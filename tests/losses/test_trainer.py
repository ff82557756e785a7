"""The losses inside SentenceTransformerTrainer: same parameters as the plain loss, an honest card, no leftovers."""

import copy

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from st_cached_extras import (
    CachedCompositeLoss,
    CachedInfoNCELoss,
    CachedLoss,
    CachedSigmoidLoss,
    CachedSupConLoss,
    ReplaySentenceTransformerTrainer,
)
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.testing.tiny_models import random_sentences, relative_error, tiny_text_model
from tests.losses.test_cached_supcon import PlainSupCon


def train(model, loss, tmp_path, **kwargs):
    dataset = Dataset.from_dict({"anchor": random_sentences(48, 1), "positive": random_sentences(48, 2)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=3,
        learning_rate=1e-2,
        optim="sgd",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **kwargs,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset.select(range(16)), loss=loss
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_reaches_the_parameters_of_the_plain_loss(tmp_path, accumulation):
    plain = tiny_text_model()
    cached = copy.deepcopy(plain)
    train(plain, MultipleNegativesRankingLoss(plain), tmp_path, gradient_accumulation_steps=accumulation)
    loss = CachedInfoNCELoss(cached, mini_batch_size=3)
    trainer = train(cached, loss, tmp_path, gradient_accumulation_steps=accumulation)
    start = dict(tiny_text_model().named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in cached.named_parameters())
    assert relative_error(dict(cached.named_parameters()), dict(plain.named_parameters())) < 1e-6
    assert trainer.evaluate()["eval_loss"] > 0


def test_bfloat16_training_runs_and_stays_near_the_plain_loss(tmp_path):
    plain = tiny_text_model()
    cached = copy.deepcopy(plain)
    train(plain, MultipleNegativesRankingLoss(plain), tmp_path, bf16=True)
    train(cached, CachedInfoNCELoss(cached, mini_batch_size=3), tmp_path, bf16=True)
    assert relative_error(dict(cached.named_parameters()), dict(plain.named_parameters())) < 1e-3


def test_the_card_names_configures_and_cites_the_loss(tmp_path):
    model = tiny_text_model()
    train(model, CachedInfoNCELoss(model, mini_batch_size=3), tmp_path)
    model.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "loss:CachedInfoNCELoss" in card
    assert '"mini_batch_size": 3' in card and '"similarity_fct": "cos_sim"' in card
    assert "gao2021scaling" in card and "oord2019" in card
    assert " object at 0x" not in card
    assert SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(["w1 w2"]).shape == (1, 16)


class Weighted(nn.Module):
    """Plain losses side by side, by name."""

    def __init__(self, model, parts):
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, columns, labels):
        embeddings = [self.model(column)["sentence_embedding"] for column in columns]
        return {
            name: weight * loss.compute_loss_from_embeddings(embeddings, labels)
            for name, (loss, weight) in self.parts.items()
        }


def several_datasets():
    triplets = {f"text_{k}": random_sentences(24, 30 + k) for k in range(3)}
    return {
        "pairs": Dataset.from_dict({"anchor": random_sentences(24, 1), "positive": random_sentences(24, 2)}),
        "scored": Dataset.from_dict(
            {"a": random_sentences(24, 3), "b": random_sentences(24, 4), "score": [k / 24 for k in range(24)]}
        ),
        "classes": Dataset.from_dict({"text": random_sentences(24, 5), "label": [k % 3 for k in range(24)]}),
        "distilled": Dataset.from_dict({**triplets, "label": [[k / 24, 1 - k / 24] for k in range(24)]}),
    }


def plain_losses(model):
    parts = {
        "ranking": (losses.MultipleNegativesRankingLoss(model), 1.0),
        "kl": (losses.DistillKLDivLoss(model, temperature=0.5), 0.5),
    }
    return {
        "pairs": losses.MultipleNegativesRankingLoss(model),
        "scored": losses.CoSENTLoss(model),
        "classes": PlainSupCon(model),
        "distilled": Weighted(model, parts),
    }


def cached_losses(model):
    parts = {"ranking": (InfoNCE(), 1.0), "kl": (losses.DistillKLDivLoss(model, temperature=0.5), 0.5)}
    return {
        "pairs": CachedInfoNCELoss(model, mini_batch_size=3),
        "scored": CachedLoss(losses.CoSENTLoss(model), mini_batch_size=3),
        "classes": CachedSupConLoss(model, mini_batch_size=3),
        "distilled": CachedCompositeLoss(model, parts, mini_batch_size=3),
    }


def test_one_run_over_several_datasets_column_counts_and_losses_equals_the_plain_one(tmp_path):
    trainers = {}
    plain = tiny_text_model()
    cached = copy.deepcopy(plain)
    for model, make in ((plain, plain_losses), (cached, cached_losses)):
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            multi_dataset_batch_sampler="round_robin",
            num_train_epochs=1,
            logging_steps=4,
            learning_rate=3e-3,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        datasets = several_datasets()
        evaluation = {name: dataset.select(range(8)) for name, dataset in datasets.items()}
        trainers[model] = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=datasets, eval_dataset=evaluation, loss=make(model)
        )
        trainers[model].train()
    start = dict(tiny_text_model().named_parameters())
    changed = {name: value - start[name] for name, value in plain.named_parameters()}
    found = {name: value - start[name] for name, value in cached.named_parameters()}
    assert trainers[cached].state.global_step == 12
    assert relative_error(found, changed) < 1e-4
    logs, plain_logs = ([log for log in trainers[m].state.log_history if "loss" in log] for m in (cached, plain))
    for log, plain_log in zip(logs, plain_logs, strict=True):
        for name in ("loss", "ranking", "kl"):
            assert log[name] == pytest.approx(plain_log[name], rel=1e-3)
    evaluated, plain_evaluated = trainers[cached].evaluate(), trainers[plain].evaluate()
    for name in several_datasets():
        assert evaluated[f"eval_{name}_loss"] == pytest.approx(plain_evaluated[f"eval_{name}_loss"], rel=1e-3)


def test_resumed_runs_restore_what_each_loss_owns(tmp_path):
    def make(folder, seed):
        model = tiny_text_model(seed=seed)
        torch.manual_seed(seed)
        parts = {
            "sigmoid": (CachedSigmoidLoss(model, scale=5.0 + seed, bias=-3.0 - seed), 1.0),
            "softmax": (losses.SoftmaxLoss(model, 16, 3), 1.0),
        }
        loss = {
            "classes": CachedSupConLoss(model, learnable_scale=True, scale=8.0 + seed),
            "pairs": CachedCompositeLoss(model, parts, mini_batch_size=3),
        }
        pairs = {"a": random_sentences(32, 1), "b": random_sentences(32, 2), "label": [k % 3 for k in range(32)]}
        datasets = {
            "classes": Dataset.from_dict({"text": random_sentences(32, 3), "label": [k % 2 for k in range(32)]}),
            "pairs": Dataset.from_dict(pairs),
        }
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            max_steps=6,
            save_steps=3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        return ReplaySentenceTransformerTrainer(model=model, args=arguments, train_dataset=datasets, loss=loss)

    whole, resumed = make(tmp_path / "whole", 0), make(tmp_path / "resumed", 1)
    start = make(tmp_path / "start", 0).loss_state()
    assert set(start) == {
        "loss.classes.objective.log_scale",
        "loss.pairs.objective.objectives.sigmoid.log_scale",
        "loss.pairs.objective.objectives.sigmoid.logit_bias",
        "loss.pairs.objective.objectives.softmax.loss.classifier.weight",
        "loss.pairs.objective.objectives.softmax.loss.classifier.bias",
    }
    whole.train()
    resumed.train(str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in whole.loss_state().items():
        assert not torch.equal(value, start[name]), name
        assert torch.equal(resumed.loss_state()[name], value), name
    assert relative_error(dict(resumed.model.named_parameters()), dict(whole.model.named_parameters())) == 0.0
