"""The losses inside SentenceTransformerTrainer: same parameters as the plain loss, an honest card, no leftovers."""

import copy

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.testing.tiny_models import random_sentences, relative_error, tiny_text_model


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
