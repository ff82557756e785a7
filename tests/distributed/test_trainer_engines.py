"""The Trainer under FSDP2 and DeepSpeed: what one process does, whole checkpoints, resumed runs, evaluation."""

import math

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import relative_error
from tests.distributed import trainer_cases

ENGINES = ("fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    story = trainer_cases.run("plain", str(tmp_path_factory.mktemp("plain")))
    del story["trainer"]
    return story


@pytest.fixture(scope="module", params=ENGINES)
def story(request, tmp_path_factory):
    """The engine, what its ranks tell, and their folder."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, run_on_ranks(trainer_cases.whole_story, 2, request.param, str(folder), timeout=400), folder


def tensors(parameters):
    return {name: torch.as_tensor(parameter) for name, parameter in parameters.items()}


def loaded(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_twenty_clipped_adam_steps_equal_one_process(story, one_process):
    _, ranks, _ = story
    for told in ranks:
        losses, norms = told["whole"]["losses"], told["whole"]["norms"]
        assert len(losses) == trainer_cases.STEPS
        assert losses == pytest.approx(one_process["losses"], abs=1e-5)
        assert norms == pytest.approx(one_process["norms"], rel=1e-4)
        assert told["resumed"]["scale"] == pytest.approx(one_process["scale"], abs=1e-5)
        parameters = tensors(told["resumed"]["parameters"])
        assert relative_error(parameters, tensors(one_process["parameters"])) <= 1e-5
    assert abs(one_process["scale"] - math.log(20.0)) > 1e-2


def test_a_resumed_run_goes_on_as_the_whole_one_did(story):
    _, ranks, _ = story
    for told in ranks:
        whole, resumed = told["whole"]["losses"], told["resumed"]["losses"]
        assert resumed == pytest.approx(whole, abs=1e-5)


def test_every_save_is_a_whole_model(story):
    _, ranks, folder = story
    last = relative_error(loaded(folder / "checkpoint-20"), tensors(ranks[0]["resumed"]["parameters"]))
    assert last <= 1e-6
    assert relative_error(loaded(folder / "final"), loaded(folder / "checkpoint-10")) == 0.0


def test_the_best_model_is_loaded_at_the_end(story):
    _, ranks, folder = story
    best = loaded(folder / "checkpoint-10")
    for told in ranks:
        assert relative_error(tensors(told["whole"]["parameters"]), best) <= 1e-7
        assert told["whole"]["scale"] != told["resumed"]["scale"]


def test_evaluation_sees_the_same_on_every_rank(story):
    _, (first, second), _ = story
    assert first["whole"]["eval"] == second["whole"]["eval"]
    metrics = first["whole"]["eval"]
    assert len(metrics) == 2 and all("eval_spearman_cosine" in of_step for of_step in metrics)
    assert metrics[0]["eval_loss"] > metrics[1]["eval_loss"]


def test_every_rank_holds_its_share(story):
    engine, ranks, _ = story
    for told in ranks:
        assert told["whole"]["share"] == pytest.approx(0.5 if engine in ("fsdp2", "zero3") else 1.0, abs=0.01)
        assert told["whole"]["optimizer share"] <= 1.03  # two moments, over two ranks
