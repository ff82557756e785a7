"""What the ranks of test_trainer_variants.py run: adapters and towers through the Trainer under an engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from torch.distributed.fsdp import FSDPModule

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.distributed.checkpoints import whole_parameters
from st_cached_extras.testing.engines import check_wrapped, fsdp2_on_cpu, trainer_arguments
from st_cached_extras.testing.tiny_models import random_clips, random_sentences, tiny_two_tower_model
from tests.distributed.trainer_cases import CONFIGS

STEPS, ROWS = 3, 8


class Embeddings(BaseEvaluator):
    """A user's own evaluator, which keeps what it embeds."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.inputs, self.found = inputs, []

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        embeddings = np.concatenate([model.encode(column) for column in self.inputs])
        self.found.append(embeddings)
        return {"mean": float(embeddings.mean())}


def arguments_of(engine: str, folder: str, **options: Any) -> SentenceTransformerTrainingArguments:
    config = json.loads((CONFIGS / f"{engine}.json").read_text()) if engine.startswith("zero") else None
    common = {
        **trainer_arguments(engine, layers=None, deepspeed=config),
        "output_dir": folder,
        "per_device_train_batch_size": ROWS if engine == "plain" else ROWS // 2,
        "max_steps": STEPS,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return SentenceTransformerTrainingArguments(**{**common, **options})


def train(engine: str, model: SentenceTransformer, data: Dataset, inputs: list[Any], arguments: Any) -> dict[str, Any]:
    """Train, save, and tell the parameters after it, and what the evaluator saw at the beginning and the end."""
    loss = CachedInfoNCELoss(model, mini_batch_size=3, gather_across_devices=True)
    evaluator = Embeddings(inputs)
    trainer = ReplaySentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=loss, evaluator=evaluator
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{arguments.output_dir}/final")
    if engine != "plain":
        check_wrapped(trainer.model_wrapped, engine)
    sharded = {type(m).__bases__[-1].__name__ for m in model.modules() if isinstance(m, FSDPModule)}
    return {
        "parameters": {name: value.numpy() for name, value in whole_parameters(trainer.model_wrapped).items()},
        "evaluated": evaluator.found,
        "sharded": sorted(sharded),
    }


def adapters(engine: str, folder: str, base: str) -> dict[str, Any]:
    """LoRA on a model from a folder, with gradient checkpointing, evaluated before the first step."""
    with fsdp2_on_cpu():
        checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        arguments = arguments_of(engine, folder, eval_on_start=True, **checkpointing)
        torch.manual_seed(0)
        model = SentenceTransformer(base, device="cpu")
        config = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
        model[0].model = get_peft_model(model[0].model, config)
        data = Dataset.from_dict({"anchor": random_sentences(48, 1), "positive": random_sentences(48, 2)})
        return train(engine, model, data, [random_sentences(5, 3)], arguments)


def _as_arrays(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"video": [np.array(clip, np.uint8) for clip in rows["video"]]} if "video" in rows else rows


def towers(engine: str, folder: str) -> dict[str, Any]:
    """A Router of texts and clips with a frozen tower, in bf16, evaluated at every step."""
    with fsdp2_on_cpu():
        mapping = {"caption": "query", "video": "document"}
        evaluated = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1}
        arguments = arguments_of(engine, folder, bf16=True, use_cpu=True, router_mapping=mapping, **evaluated)
        model = tiny_two_tower_model()
        model[0].sub_modules["text"][0].model.pooler = None
        model[0].sub_modules["video"].requires_grad_(False)
        clips = [clip.tolist() for clip in random_clips(48, 1)]
        data = Dataset.from_dict({"caption": random_sentences(48, 2), "video": clips}).with_transform(_as_arrays)
        return train(engine, model, data, [random_sentences(5, 3), random_clips(4, 4)], arguments)


def both(engine: str, folder: str, base: str) -> dict[str, Any]:
    return {"adapters": adapters(engine, f"{folder}/adapters", base), "towers": towers(engine, f"{folder}/towers")}
