"""The evaluator finds what a slow search finds, both ways, and remembers what was before training."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model


class Model:
    """Embeds by a function, and notes how many inputs came at once."""

    def __init__(self, embed, dtype=torch.float32):
        self.embed, self.dtype, self.calls = embed, dtype, []
        self.model_card_data = SentenceTransformerModelCardData()

    def encode_query(self, inputs, *, side="query", **options):
        assert options["convert_to_tensor"]
        self.calls.append((side, len(inputs)))
        return torch.tensor(np.array([self.embed(side, value) for value in inputs])).to(self.dtype)

    def encode_document(self, inputs, **options):
        return self.encode_query(inputs, side="document", **options)

    def similarity(self, a, b):
        return a @ b.T


def random_embeddings(seed: int):
    def embed(side: str, value) -> np.ndarray:
        if isinstance(value, np.ndarray):
            value = value.sum()
        return np.random.default_rng(abs(hash((seed, side, str(value)))) % 2**32).normal(size=3)

    return embed


def slow_ranks(queries, answers, embed) -> dict[str, list[int]]:
    """By double loop over the rows' own values."""
    found = {}
    for name, left, right, sides in (
        ("forward", queries, answers, ("query", "document")),
        ("backward", answers, queries, ("document", "query")),
    ):
        ranks = []
        for query in dict.fromkeys(left):
            ours = {answer for q, answer in zip(left, right, strict=True) if q == query}
            score = {a: float(embed(sides[0], query) @ embed(sides[1], a)) for a in dict.fromkeys(right)}
            best = max(score[answer] for answer in ours)
            ranks.append(sum(score[a] >= best for a in score if a not in ours))
        found[name] = ranks
    return found


@pytest.mark.parametrize("seed", range(4))
def test_ranks_both_ways_are_those_of_a_slow_search_where_texts_repeat(seed):
    rng = np.random.default_rng(seed)
    queries = [f"q{i}" for i in rng.integers(0, 12, 20)]
    answers = [f"a{i}" for i in rng.integers(0, 15, 20)]
    embed = random_embeddings(seed)
    evaluator = RetrievalEvaluator(Dataset.from_dict({"query": queries, "answer": answers}), name="a b")
    metrics = evaluator(Model(embed))
    truth = slow_ranks(queries, answers, embed)
    assert evaluator.last.ranks["query_to_answer"].tolist() == truth["forward"]
    assert evaluator.last.ranks["answer_to_query"].tolist() == truth["backward"]
    assert metrics["a_b_query_to_answer_recall@5"] == pytest.approx(np.mean(np.array(truth["forward"]) < 5))
    assert metrics["a_b_answer_to_query_median_rank"] == np.median(truth["backward"]) + 1
    assert evaluator.primary_metric in metrics


def test_chunks_of_the_table_change_nothing(monkeypatch):
    pairs = Dataset.from_dict({"query": [f"q{i % 9}" for i in range(30)], "answer": [f"a{i}" for i in range(30)]})
    whole, parts = RetrievalEvaluator(pairs), RetrievalEvaluator(pairs)
    whole(Model(random_embeddings(0)))
    monkeypatch.setattr("st_cached_extras.evaluation.retrieval.ROWS_AT_ONCE", 4)
    parts(Model(random_embeddings(0)))
    for direction, ranks in whole.last.ranks.items():
        assert (ranks == parts.last.ranks[direction]).all()
        assert (whole.best[direction] == parts.best[direction]).all()


def clips(n: int) -> Dataset:
    features = datasets.Features(
        {"caption": datasets.Value("string"), "clip": datasets.Array4D((2, 4, 4, 3), "uint8")}
    )
    rows = {
        "caption": [f"c{i // 2}" for i in range(n)],
        "clip": [np.full((2, 4, 4, 3), i, np.uint8) for i in range(n)],
    }
    return Dataset.from_dict(rows, features=features).with_format("numpy", ["clip"], output_all_columns=True)


def test_clips_are_read_a_batch_at_a_time_and_told_apart_by_row():
    evaluator = RetrievalEvaluator(clips(10), "caption", "clip", batch_size=4)
    model = Model(random_embeddings(1))
    evaluator(model)
    assert [size for side, size in model.calls if side == "document"] == [4, 4, 2]
    assert [size for side, size in model.calls if side == "query"] == [5]
    assert evaluator.answers_of == {"caption_to_clip": 10, "clip_to_caption": 5}
    assert len(evaluator.last.ranks["caption_to_clip"]) == 5
    shown = evaluator.retrieved(3, 2)
    assert [row.caption for row in shown] == ["c0", "c2", "c4"]
    for row in shown:
        assert [clip.shape for clip in row.clips] == [(2, 4, 4, 3)] * 2
        number = int(row.caption[1:])
        assert list(row.right) == [int(clip[0, 0, 0, 0]) // 2 == number for clip in row.clips]


def test_half_precision_makes_no_ties():
    # In bf16 both scores of the query would be 1; the wrong answer is worse by a thousandth.
    vectors = {"q": [1.0, 0.0625], "right": [1.0, 0.0625], "wrong": [1.0, 0.046875], "other": [0.0, 0.0]}
    pairs = Dataset.from_dict({"query": ["q", "other"], "answer": ["right", "wrong"]})
    evaluator = RetrievalEvaluator(pairs)
    evaluator(Model(lambda side, value: np.array(vectors[value]), dtype=torch.bfloat16))
    assert evaluator.last.ranks["query_to_answer"][0] == 0


def test_a_model_of_one_embedding_scores_nothing():
    pairs = Dataset.from_dict({"query": [f"q{i}" for i in range(8)], "answer": [f"a{i}" for i in range(8)]})
    evaluator = RetrievalEvaluator(pairs)
    metrics = evaluator(Model(lambda side, value: np.ones(2)))
    assert metrics["held_out_query_to_answer_recall@5"] == 0
    assert metrics["held_out_query_to_answer_median_rank"] == 8


@pytest.mark.parametrize(
    "columns, message",
    [
        (("text", "answer"), r"query_column: found 'text', expected one of \['query', 'answer'\]"),
        (("query", "text"), r"answer_column: found 'text'"),
        (("query", "query"), r"both 'query', expected two columns"),
    ],
)
def test_wrong_columns_are_named(columns, message):
    pairs = Dataset.from_dict({"query": ["a"], "answer": ["b"]})
    with pytest.raises(ValueError, match=message):
        RetrievalEvaluator(pairs, *columns)
    with pytest.raises(ValueError, match="found no rows"):
        RetrievalEvaluator(pairs.select([]))


def trainer_of(folder, evaluator, steps: int) -> ReplaySentenceTransformerTrainer:
    model = tiny_text_model()
    train = Dataset.from_dict({"query": random_sentences(32, 1), "answer": random_sentences(32, 2)})
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=16, learning_rate=0.01, save_steps=2,
        eval_on_start=True, eval_strategy="steps", eval_steps=100, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    loss = CachedInfoNCELoss(model, mini_batch_size=8)
    return ReplaySentenceTransformerTrainer(
        model=model, args=args, train_dataset=train, loss=loss, evaluator=evaluator
    )


def test_the_trainer_evaluates_before_and_after_and_a_resumed_run_knows_what_was_before(tmp_path):
    held_out = Dataset.from_dict({"query": random_sentences(24, 3), "answer": random_sentences(24, 4)})
    evaluator = RetrievalEvaluator(held_out, name="held out")
    trainer = trainer_of(tmp_path, [evaluator], steps=4)
    trainer.train()
    metrics = trainer.evaluate()
    assert (evaluator.first.steps, evaluator.last.steps) == (0, 4)
    mrr = "held_out_query_to_answer_mrr"
    assert metrics[f"eval_{mrr}"] == pytest.approx(evaluator.metrics(evaluator.last)["query_to_answer_mrr"])
    assert trainer.model.model_card_data.eval_results_dict[evaluator][mrr] == metrics[f"eval_{mrr}"]
    assert any(
        (a != b).any() for a, b in zip(*(r.ranks.values() for r in (evaluator.first, evaluator.last)), strict=True)
    )
    assert {"Before", "After", "Chance"} <= set(evaluator.rows()[0])

    later = RetrievalEvaluator(held_out, name="held out")
    resumed = trainer_of(tmp_path, [later], steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert (later.first.steps, later.last.steps) == (0, 6)
    for direction, ranks in evaluator.first.ranks.items():
        assert (later.first.ranks[direction] == ranks).all()

    # Of other pairs, what was written down is not taken: the card then says from which step it knows.
    other = RetrievalEvaluator(held_out.select(range(20)), name="held out")
    resumed = trainer_of(tmp_path, [other], steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert other.first.steps == 4
    assert "Step 4" in other.rows()[0] and "Before" not in other.rows()[0]
    assert json.loads((tmp_path / "eval" / "retrieval_held_out_first.json").read_text())["steps"] == 0
