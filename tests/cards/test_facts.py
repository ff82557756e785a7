"""What a card says of data and runs: the same data have one fingerprint anywhere, and facts are the Trainer's."""

from __future__ import annotations

import re

import datasets
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MatryoshkaLoss

from st_cached_extras import CachedCompositeLoss, CachedInfoNCELoss, CachedLoss, ReplaySentenceTransformerTrainer
from st_cached_extras.cards import ReplayModelCardData, describe_dataset, training_facts
from st_cached_extras.cards.training_facts import layers_without_backward, replay_losses
from st_cached_extras.evaluation import RetrievalEvaluator
from st_cached_extras.objectives import InfoNCE
from st_cached_extras.recipes.finish import as_text, finish
from st_cached_extras.testing.tiny_models import random_sentences, tiny_text_model
from st_cached_extras.zbp import ZBPConfig, apply_zbp


def pairs(count: int = 32, seed: int = 1) -> Dataset:
    return Dataset.from_dict({"query": random_sentences(count, seed), "answer": random_sentences(count, seed + 1)})


def fingerprint(dataset) -> str:
    return re.search(r"`(\w{16})`", describe_dataset(dataset))[1]


# -------------------------------------------------------------------------------------------------------------- data


def test_the_same_rows_have_one_fingerprint_however_they_were_made(tmp_path):
    rows = pairs()
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    again = loaded.map(lambda row: row, load_from_cache_file=False)
    shuffled = rows.shuffle(seed=3)
    assert fingerprint(rows) == fingerprint(loaded) == fingerprint(again)
    assert fingerprint(rows) == fingerprint(rows.with_format("numpy"))
    assert fingerprint(shuffled) == fingerprint(shuffled.flatten_indices()) != fingerprint(rows)


def test_other_rows_columns_and_counts_have_others():
    rows = pairs()
    changed = [row if index != 17 else {**row, "answer": "w1"} for index, row in enumerate(rows)]
    found = [rows, Dataset.from_list(changed), rows.rename_column("answer", "reply"), rows.select(range(31))]
    assert len({fingerprint(dataset) for dataset in found}) == 4


def test_media_are_told_by_their_bytes_and_not_by_where_they_lie(tmp_path):
    made = []
    for folder, content in (("a", b"clip"), ("b", b"clip"), ("c", b"another")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.mp4").write_bytes(content)
        rows = Dataset.from_dict({"video": [str(tmp_path / folder / "0.mp4")]})
        made.append(fingerprint(rows.cast_column("video", datasets.Video(decode=False))))
    assert made[0] == made[1] != made[2]


def test_large_several_and_streamed_datasets_are_described():
    assert re.fullmatch(r"300 texts, fingerprint of 256 of them `\w{16}`", describe_dataset(pairs(300), "texts"))
    both = describe_dataset(DatasetDict({"a": pairs(4), "b": pairs(5)}))
    assert re.fullmatch(r"a: 4 rows, fingerprint `\w{16}`; b: 5 rows, fingerprint `\w{16}`", both)
    assert describe_dataset(pairs(4).to_iterable_dataset()) == "streamed rows, not counted and without a fingerprint"


# -------------------------------------------------------------------------------------------------------------- runs


def trainer_of(folder, loss, evaluator=None, **options) -> ReplaySentenceTransformerTrainer:
    options = {"max_steps": 2, "eval_on_start": evaluator is not None, **options}
    args = SentenceTransformerTrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        seed=5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return ReplaySentenceTransformerTrainer(
        model=loss.model, args=args, train_dataset=pairs(), loss=loss, evaluator=evaluator and [evaluator]
    )


def test_facts_name_the_share_that_is_differentiated_also_inside_wrappers(tmp_path):
    model = tiny_text_model()
    loss = CachedInfoNCELoss(model, mini_batch_size=4, differentiated_samples=0.25, kept_graphs=0.5)
    wrapped = MatryoshkaLoss(model, loss, [16, 8])
    assert list(replay_losses({"one": wrapped})) == [loss]
    facts = training_facts(trainer_of(tmp_path, wrapped, gradient_accumulation_steps=2), "pairs")
    assert facts["Batch"] == "8 pairs, 2 batches a step"
    assert facts["Memory"] == (
        "mini-batches of 4 rows, 50% of their graphs kept, 25% of the rows are differentiated, drawn at random in "
        "each step and weighted for the rest"
    )
    assert (facts["Engine"], facts["Precision"], facts["Seed"]) == ("one process", "float32", 5)
    assert facts["Machine"].startswith("CPU, ")
    assert "Layers without a backward" not in facts


def test_facts_name_layers_without_a_backward_and_their_queries(tmp_path):
    model = tiny_text_model(layers=2)
    config = ZBPConfig(mode="cd", n_probes=3, eps=0.1)
    apply_zbp(model, [-1], config)
    loss = CachedInfoNCELoss(model, mini_batch_size=8)
    trainer = trainer_of(tmp_path, loss, max_steps=1)
    trainer.train()
    # Two columns of one mini-batch; central differences of 3 probes are 6 queries each.
    found = training_facts(trainer)["Layers without a backward"]
    assert re.fullmatch(r"`\S+layer\.1`: cd, 12 queries in 2 backwards", found)
    assert layers_without_backward(tiny_text_model()) == ""


def test_losses_are_cited_once_and_tagged_although_wrapped(tmp_path):
    model = tiny_text_model()
    both = CachedCompositeLoss(model, {"pairs": (InfoNCE(), 1.0), "scores": (CachedLoss(CoSENTLoss(model)), 0.5)})
    card = ReplayModelCardData()
    card.set_losses([both])
    assert {f"loss:{name}" for name in ("CachedCompositeLoss", "InfoNCE", "CachedLoss", "CoSENTLoss")} <= set(
        card.tags
    )
    assert not any("_" in tag for tag in card.tags if tag.startswith("loss:"))
    cited = "\n".join(card.citations.values())
    assert cited.count("Scaling Deep Contrastive Learning") == 1
    assert "CoSENT" in cited


# ------------------------------------------------------------------------------------------------------------ finish


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run that was finished: the Trainer, the evaluator, the folder and the card's text."""
    folder = tmp_path_factory.mktemp("finished")
    card = ReplayModelCardData(model_name="Finder", command="python train.py", limits=["It knows 64 words."])
    model = tiny_text_model()
    model.model_card_data = card
    card.register_model(model)
    evaluator = RetrievalEvaluator(pairs(12, seed=7), name="held out")
    trainer = trainer_of(folder, CachedInfoNCELoss(model, mini_batch_size=4), evaluator, learning_rate=0.01)
    trainer.train()
    final = finish(trainer, card, [evaluator], train=pairs(), facts={"Own": "a fact of the recipe"})
    return trainer, evaluator, final, (final / "README.md").read_text()


def test_the_table_holds_what_the_evaluator_found_before_and_after(finished):
    _, evaluator, _, text = finished
    for result, column in ((evaluator.first, 4), (evaluator.last, 5)):
        for metric, value in evaluator.metrics(result).items():
            direction, _, name = metric.partition("answer_" if metric.startswith("query") else "query_")
            way = "query to answer" if direction == "query_to_" else "answer to query"
            label = name.replace("recall", "R").replace("mrr", "MRR").replace("_", " ")
            [row] = [line for line in text.splitlines() if line.startswith(f"| held out | {way} | {label} |")]
            assert row.split("|")[column + 1].strip().startswith(f"{value:.3f} ("), metric


def test_the_model_index_has_the_evaluators_own_names_and_the_last_values(finished):
    _, evaluator, _, text = finished
    [result] = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"]
    assert result["dataset"] == {"name": "held out", "type": "held_out"}
    found = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert found == pytest.approx(evaluator.metrics(evaluator.last))


def test_the_card_says_what_was_not_tested_no_licence_and_where_it_is(finished):
    text = finished[3]
    assert "## Not tested" in text and "Retrieval among more than 12 answers" in text
    assert "None was stated by those who trained it" in text
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert 'SentenceTransformer("path/to/the/folder/of/this/card")' in text
    for line in ("- **Own:** a fact of the recipe", "- **Steps:** 2", "- **Training:** 32 pairs, fingerprint"):
        assert line in text


def test_a_stated_licence_is_in_the_card(tmp_path):
    card = ReplayModelCardData(license="apache-2.0")
    model = tiny_text_model()
    model.model_card_data = card
    card.register_model(model)
    model.save_pretrained(str(tmp_path / "final"))
    text = (tmp_path / "final" / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"
    assert "apache-2.0, as stated by those who trained it." in text


def test_what_was_saved_takes_the_place_of_an_older_model_whole(finished, monkeypatch):
    trainer, evaluator, final, _ = finished
    (final / "of_an_older_model.bin").write_bytes(b"old")

    def fails(folder):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "save_model", fails)
        with pytest.raises(OSError, match="No space"):
            finish(trainer, ReplayModelCardData(), [evaluator], train=pairs())
    assert (final / "of_an_older_model.bin").exists() and (final / "README.md").exists()
    finish(trainer, trainer.model.model_card_data, [evaluator], train=pairs())
    assert not list(final.rglob("*.bin"))  # nor a pickle of the Trainer's
    assert (final / "README.md").read_text().count("(retrieval.png)") == 1
    trainer.model.save_pretrained(str(final.parent / "elsewhere"))
    assert (final.parent / "elsewhere" / "retrieval.png").exists()
    assert [path.name for path in final.parent.iterdir() if path.name.startswith(".")] == []


def test_the_model_is_not_scored_twice_at_the_same_step(finished, monkeypatch):
    trainer, evaluator, _, _ = finished
    calls = []
    monkeypatch.setattr(trainer, "evaluate", lambda: calls.append(1))
    finish(trainer, trainer.model.model_card_data, [evaluator], train=pairs())
    assert calls == []
    monkeypatch.setattr(trainer.args, "resume_from_checkpoint", "last")
    finish(trainer, trainer.model.model_card_data, [evaluator], train=pairs())
    assert calls == [1]
    monkeypatch.setattr(trainer.args, "resume_from_checkpoint", None)
    monkeypatch.setattr(trainer.state, "global_step", 3)
    finish(trainer, trainer.model.model_card_data, [evaluator], train=pairs())
    assert calls == [1, 1]


def test_the_printed_table_is_in_line():
    table = as_text([{"Split": "held out", "R@1": 0.5}, {"Split": "x", "R@1": "0.250 (0.1 to 0.4)"}])
    assert table.splitlines() == ["Split     R@1", "held out  0.500", "x         0.250 (0.1 to 0.4)"]


def test_the_facts_of_a_machine_name_no_host():
    import socket

    from st_cached_extras.cards import machine

    assert socket.gethostname() not in machine(torch.device("cpu"))
