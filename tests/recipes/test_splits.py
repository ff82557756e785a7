"""What a recipe trains on and is scored on, and what it sets in the Trainer's arguments."""

from __future__ import annotations

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from st_cached_extras.data import DataError, take_columns
from st_cached_extras.recipes.arguments import DataArguments, LoraArguments, RecipeTrainingArguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.splits import load_splits, texts_of
from st_cached_extras.recipes.training import check_training, stop_early


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def sources(tmp_path) -> list[str]:
    """Two files of the same name, and a saved dataset with a split to evaluate on."""
    rows = Dataset.from_dict({"term": [f"term {i}" for i in range(40)], "gloss": [f"gloss {i}" for i in range(40)]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rows.to_parquet(str(tmp_path / folder / "pairs.parquet"))
    DatasetDict(train=rows, test=rows.select(range(9))).save_to_disk(str(tmp_path / "splits"))
    return [str(tmp_path / "a" / "pairs.parquet"), str(tmp_path / "b" / "pairs.parquet"), str(tmp_path / "splits")]


def prepare(rows, source: str, index: int):
    return take_columns(rows, {"query": "term", "answer": "gloss"})


def splits(**arguments):
    return load_splits(DataArguments(**arguments), prepare, 0, held_out="query")


def test_a_tenth_is_held_out_and_numbers_of_rows_are_kept_to(sources):
    train, evaluation = splits(dataset=sources[:1])
    assert len(train) == 36 and {name: len(rows) for name, rows in evaluation.items()} == {"held out": 4}
    assert not set(train["query"]) & set(evaluation["held out"]["query"])
    train, evaluation = splits(dataset=sources[:1], train_rows=10, eval_rows=7)
    assert len(train) == 10 and len(evaluation["held out"]) == 7


def test_a_split_to_evaluate_on_is_taken_as_it_is(sources):
    train, evaluation = splits(dataset=sources[2:], eval_split="test", eval_rows=5)
    assert len(train) == 40 and len(evaluation["test"]) == 5
    with pytest.raises(DataError, match=r"no split 'dev'; its splits are \['train', 'test'\]"):
        splits(dataset=sources[2:], eval_split="dev")


def test_several_datasets_keep_names_apart(sources):
    train, evaluation = splits(dataset=sources)
    assert list(train) == ["pairs", "pairs 2", "splits"]
    assert list(evaluation) == ["pairs held out", "pairs 2 held out", "splits held out"]
    assert len(texts_of(train, "query")) == 3 * 36


def test_the_first_rows_of_a_stream_are_kept_to_evaluate_on_and_not_trained_on(sources):
    train, evaluation = splits(dataset=sources[:1], streaming=True, eval_rows=6, train_rows=20)
    assert isinstance(train, IterableDataset) and [row["query"] for row in train] == [
        f"term {i}" for i in range(6, 26)
    ]
    assert evaluation["first 6"]["query"][:] == [f"term {i}" for i in range(6)]
    with pytest.raises(UsageError, match="--streaming reads one dataset"):
        splits(dataset=sources[:2], streaming=True)
    with pytest.raises(UsageError, match="--streaming needs --model"):
        texts_of(train, "query")


def training(tmp_path, **options) -> RecipeTrainingArguments:
    return RecipeTrainingArguments(str(tmp_path / "out"), use_cpu=True, **options)


class Evaluator:
    primary_metric = "held_out_mrr"


def test_early_stopping_sets_what_it_needs(tmp_path):
    args = training(tmp_path, early_stopping_patience=3, eval_strategy="steps", eval_steps=5)
    check_training(args, DataArguments(), ["query"])
    (callback,) = stop_early(args, [Evaluator()])
    assert callback.early_stopping_patience == 3
    assert (args.save_strategy, args.save_steps, args.load_best_model_at_end) == ("steps", 5, True)
    assert args.metric_for_best_model == "eval_held_out_mrr" and args.greater_is_better
    assert stop_early(training(tmp_path), [Evaluator()]) == []
    with pytest.raises(UsageError, match="--early_stopping_patience needs --eval_strategy"):
        check_training(training(tmp_path, early_stopping_patience=3), DataArguments(), ["query"])


def test_a_checkpoint_is_found_or_missed_by_name(tmp_path):
    for step in (2, 10):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    last = str(tmp_path / "out" / "checkpoint-10")
    assert check_training(training(tmp_path, resume_from_checkpoint="last"), DataArguments(), []) == last
    with pytest.raises(UsageError, match=r"checkpoint-10: there is no checkpoint, which has a trainer_state\.json"):
        check_training(training(tmp_path, resume_from_checkpoint=last), DataArguments(), [])
    (tmp_path / "out" / "checkpoint-10" / "trainer_state.json").write_text("{}")
    assert check_training(training(tmp_path, resume_from_checkpoint=last), DataArguments(), []) == last
    assert check_training(training(tmp_path), DataArguments(), []) is None


def test_workers_stay_for_all_epochs_and_streams_have_no_sampler(tmp_path):
    args = training(tmp_path, dataloader_num_workers=2, max_steps=3)
    check_training(args, DataArguments(streaming=True, dataset=["x"]), ["query"])
    assert args.dataloader_persistent_workers and args.batch_sampler == "batch_sampler"
    args = training(tmp_path)
    check_training(args, DataArguments(), ["query"])
    assert callable(args.batch_sampler) and not args.dataloader_persistent_workers
    with pytest.raises(UsageError, match="--streaming needs --dataset"):
        check_training(training(tmp_path, max_steps=3), DataArguments(streaming=True), ["query"])


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_adapters_are_refused_where_devices_hold_shards(engine, tmp_path, monkeypatch):
    class Arguments(DataArguments, LoraArguments):
        pass

    script, args = Arguments(), training(tmp_path)
    script.lora_rank = 4
    check_training(args, script, ["query"])
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(UsageError, match="--lora_rank is for one device or DDP"):
        check_training(args, script, ["query"])
