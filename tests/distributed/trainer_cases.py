"""What the ranks of test_trainer_engines.py run: the Trainer under an engine, whole, resumed, saved and evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.distributed.checkpoints import whole_parameters
from st_cached_extras.testing.engines import (
    check_wrapped,
    fsdp2_on_cpu,
    local_elements,
    local_optimizer_elements,
    trainer_arguments,
)
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model

STEPS, ROWS = 20, 16
CONFIGS = Path(__file__).parents[2] / "training_scripts" / "configs"


def make_model(seed: int = 0) -> SentenceTransformer:
    model = tiny_text_model(seed=seed)
    model[0].model.pooler.requires_grad_(False)  # mean pooling leaves it without a gradient
    return model


def make_trainer(engine: str, folder: str, seed: int = 0, **options: Any) -> ReplaySentenceTransformerTrainer:
    ranks = 1 if engine == "plain" else dist.get_world_size()
    config = json.loads((CONFIGS / f"{engine}.json").read_text()) if engine.startswith("zero") else None
    with fsdp2_on_cpu():
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            **trainer_arguments(engine, deepspeed=config),
            per_device_train_batch_size=ROWS // ranks,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=5e-3,
            warmup_steps=4,
            max_grad_norm=0.5,
            adam_epsilon=1e-4,
            weight_decay=0.01,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            dataloader_drop_last=True,
            **{"save_strategy": "no", **options},
        )
        model = make_model(seed)
        dataset = Dataset.from_dict({"anchor": random_sentences(160, 1), "positive": random_sentences(160, 2)})
        loss = CachedInfoNCELoss(model, mini_batch_size=4, gather_across_devices=True, learnable_scale=True)
        evaluated = "eval_strategy" in options
        sentences = random_sentences(12, 3), random_sentences(12, 4)
        evaluator = EmbeddingSimilarityEvaluator(*sentences, [index / 12 for index in range(12)], write_csv=False)
        return ReplaySentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(32)) if evaluated else None,
            evaluator=evaluator if evaluated else None,
            loss=loss,
        )


def run(engine: str, folder: str, *, resume: str | None = None, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Train, and return what came of it."""
    trainer = make_trainer(engine, folder, seed, **options)
    with fsdp2_on_cpu():
        trainer.train(resume)
    parameters = whole_parameters(trainer.model_wrapped)
    total = sum(parameter.numel() for parameter in parameters.values())
    if engine != "plain":
        check_wrapped(trainer.model_wrapped, engine)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval": [
            {k: v for k, v in entry.items() if "eval" in k and "_per_" not in k and "runtime" not in k}
            for entry in history
            if "eval_loss" in entry
        ],
        "parameters": {name: parameter.numpy() for name, parameter in parameters.items()},
        "scale": trainer.loss.objective.log_scale.item(),
        "share": local_elements(trainer.model_wrapped) / total,
        "optimizer share": local_optimizer_elements(trainer.optimizer) / total,
        "trainer": trainer,
    }


def whole_story(engine: str, folder: str) -> dict[str, Any]:
    """A run with evaluations, checkpoints and the best model, which is that of the middle; and one resumed there."""
    torch.manual_seed(0)
    strategies = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    story = run(engine, folder, **strategies, **best)
    story.pop("trainer").save_model(str(Path(folder) / "final"))
    resumed = run(engine, f"{folder}-resumed", resume=str(Path(folder) / "checkpoint-10"), seed=5)
    del resumed["trainer"]
    return {"whole": story, "resumed": resumed}
