"""Adapters and towers through the Trainer under every engine that shards: the steps, what is saved, evaluation."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer

from st_cached_extras.testing.ranks import run_on_ranks
from st_cached_extras.testing.tiny_models import relative_error, tiny_text_model, tiny_two_tower_model
from tests.distributed import trainer_variants

CHANGE, BF16 = 2e-5, 5e-2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of the model that gets adapters."""
    folder = str(tmp_path_factory.mktemp("base"))
    tiny_text_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return trainer_variants.both("plain", str(tmp_path_factory.mktemp("plain")), base)


@pytest.fixture(scope="module", params=["fsdp2", "zero1", "zero2", "zero3"])
def told(request, base, tmp_path_factory):
    """The engine, what its ranks tell, and their folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_on_ranks(trainer_variants.both, 2, request.param, str(folder), base), folder


def changes(parameters, start):
    return {name: torch.as_tensor(value) - start[name] for name, value in parameters.items()}


def test_adapters_train_as_in_one_process_with_gradient_checkpointing(told, one_process):
    expected = one_process["adapters"]["parameters"]
    for rank in told[1]:
        found = rank["adapters"]["parameters"]
        trained = [name for name in found if "lora_" in name]
        start = {name: torch.zeros_like(torch.as_tensor(expected[name])) for name in trained}
        assert len(trained) == 8
        tensors = ({name: parameters[name] for name in trained} for parameters in (found, expected))
        assert relative_error(*(changes(parameters, start) for parameters in tensors)) <= CHANGE
        for name in found.keys() - set(trained):
            assert np.array_equal(found[name], expected[name])


def test_saved_adapters_are_whole_and_load_over_the_plain_model(told, base):
    _, ranks, folder = told
    model = SentenceTransformer(base, device="cpu")
    model[0].model = PeftModel.from_pretrained(model[0].model, str(folder / "adapters" / "final"))
    found = dict(model.named_parameters())
    for name, value in ranks[0]["adapters"]["parameters"].items():
        assert torch.equal(found[name].detach(), torch.as_tensor(value)), name


def test_a_router_with_a_frozen_tower_trains_in_bf16(told, one_process):
    start = {name: value.detach() for name, value in tiny_two_tower_model().named_parameters()}
    expected = one_process["towers"]["parameters"]
    text = [name for name in expected if ".text." in name]
    for rank in told[1]:
        found = rank["towers"]["parameters"]
        assert found.keys() == expected.keys()
        moved = (changes({name: of[name] for name in text}, start) for of in (found, expected))
        assert relative_error(*moved) <= BF16
        for name in found.keys() - set(text):  # which DeepSpeed holds in bf16 alone
            assert np.allclose(found[name], start[name], rtol=2**-8, atol=0)


def test_a_saved_router_is_whole(told):
    _, ranks, folder = told
    model = SentenceTransformer(str(folder / "towers" / "final"), device="cpu")
    found = dict(model.named_parameters())
    for name, value in ranks[0]["towers"]["parameters"].items():
        # The masters under FSDP2, and the weights in bf16 under DeepSpeed.
        assert torch.allclose(found[name].detach().float(), torch.as_tensor(value), rtol=2**-7, atol=1e-9), name


def test_evaluators_embed_before_in_and_after_training(told, one_process):
    for kind, times, tolerance in (("adapters", 2, 1e-5), ("towers", 5, 3e-2)):
        expected = one_process[kind]["evaluated"]
        for rank in told[1]:
            found = rank[kind]["evaluated"]
            assert len(found) == len(expected) == times
            assert all(x.dtype == np.float32 for x in found)
            for one, other in zip(found, expected, strict=True):
                assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)
            assert np.linalg.norm(found[0] - found[-1]) > 3 * tolerance * np.linalg.norm(found[0])


def test_layers_are_sharded_one_by_one_without_being_named(told):
    engine, ranks, _ = told
    expected = {"BertLayer", "VideoMAELayer", "SentenceTransformer"} if engine == "fsdp2" else set()
    assert set(ranks[0]["towers"]["sharded"]) >= expected
