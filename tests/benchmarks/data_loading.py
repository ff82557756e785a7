"""How long the embedded video recipe waits for its data, with clips decoded by workers while the model computes.

    python -m tests.benchmarks.data_loading --workers 0 2

trains the default model of `train_video_embedder.py` on moving shapes for some steps, once for each number of workers,
and prints the means over steps of the time between asking for a batch and having it, and of whole steps. Ends of
epochs are among them; the first steps, in which workers start, are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from torch.utils.data import DataLoader

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.data import decode_videos, distinct, moving_shapes
from tests.benchmarks.measure import header, table

sys.path.insert(0, str(Path(__file__).parents[2] / "training_scripts"))
from tiny_video_tower import tiny_video_tower

NOT_COUNTED = 3


class TimedTrainer(ReplaySentenceTransformerTrainer):
    """Notes how long each batch is waited for, and when."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[float] = []
        self.waited: list[float] = []

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        return _Timed(loader, self.asked, self.waited)  # type: ignore[return-value]


class _Timed:
    """A loader that is waited for with a watch in hand."""

    def __init__(self, loader: DataLoader, asked: list[float], waited: list[float]) -> None:
        self.loader, self.asked, self.waited = loader, asked, waited

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.asked.append(begin)
            self.waited.append(time.perf_counter() - begin)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def measure(clips: Dataset, workers: int, steps: int, batch: int, mini_batch: int) -> tuple[float, float]:
    """Mean seconds of waiting for a batch, and of a step from one request for a batch to the next."""
    torch.manual_seed(0)
    model = tiny_video_tower(clips["caption"])
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps + NOT_COUNTED,
            per_device_train_batch_size=batch,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            batch_sampler=distinct("caption"),
            router_mapping={"caption": "query", "video": "document"},
            learning_rate=1.5e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        loss = CachedInfoNCELoss(model, mini_batch_size=mini_batch)
        trainer = TimedTrainer(model=model, args=args, train_dataset=clips, loss=loss)
        trainer.train()
    asked, waited = trainer.asked[NOT_COUNTED:], trainer.waited[NOT_COUNTED:]
    return statistics.mean(waited[:-1]), (asked[-1] - asked[0]) / (len(asked) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of workers")
    parser.add_argument("--steps", type=int, default=24, help="steps that are counted")
    parser.add_argument("--clips", type=int, default=2048, help="clips to train on")
    parser.add_argument("--batch", type=int, default=128, help="clips that are contrasted at once")
    parser.add_argument("--mini_batch", type=int, default=32, help="clips that are in memory at once")
    arguments = parser.parse_args()
    print(header())
    clips = moving_shapes("train", arguments.clips).select_columns(["caption", "video"])
    clips = decode_videos(clips, num_frames=8)
    rows = []
    for workers in arguments.workers:
        waited, step = measure(clips, workers, arguments.steps, arguments.batch, arguments.mini_batch)
        rows.append([workers, f"{waited:.3f}", f"{step:.3f}", f"{100 * waited / step:.0f} %"])
    print(table(["Workers", "Waiting for a batch, s", "A step, s", "Waiting"], rows))


if __name__ == "__main__":
    main()
