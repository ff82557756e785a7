"""Trains a tiny model with a learned scale through the Trainer; run by test_trainer_ddp.py on one rank or on two."""

import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformerTrainingArguments
from torch.nn.parallel import DistributedDataParallel

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model


def main(folder: str, batch_size: int, resume: bool) -> None:
    torch.set_num_threads(1)
    model = tiny_text_model()
    dataset = Dataset.from_dict({"anchor": random_sentences(96, 1), "positive": random_sentences(96, 2)})
    loss = CachedInfoNCELoss(model, mini_batch_size=3, gather_across_devices=True, learnable_scale=True)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
    )
    trainer = ReplaySentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset.select(range(32)), loss=loss
    )
    trainer.train(f"{folder}/checkpoint-2" if resume else None)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (ranks > 1)
    rank = dist.get_rank() if ranks > 1 else 0
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file({**state, "log_scale": loss.objective.log_scale.detach()}, f"{folder}/rank{rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume")
