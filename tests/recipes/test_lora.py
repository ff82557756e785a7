"""Adapters train alone, and what is saved is the whole model with them in its weights."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer
from sentence_transformers import SentenceTransformer

from st_cached_extras import CachedInfoNCELoss
from st_cached_extras.recipes.arguments import LoraArguments
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.lora import add_lora
from st_cached_extras.testing.tiny_models import text_columns, tiny_text_model, tiny_two_tower_model
from st_cached_extras.testing.tiny_vlms import tiny_qwen3_vl


@pytest.mark.parametrize("make", [tiny_text_model, tiny_two_tower_model, tiny_qwen3_vl])
def test_adapters_are_all_that_trains_in_every_tower(make):
    model = make()
    before = sum(parameter.numel() for parameter in model.parameters())
    add_lora(model, LoraArguments(lora_rank=2))
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert sum(parameter.numel() for parameter in model.parameters()) == before + sum(trained.values())
    towers = {name.split("model.")[0] for name in trained}
    assert len(towers) == (2 if make is tiny_two_tower_model else 1)


def test_adapters_for_layers_that_are_not_there_are_refused():
    with pytest.raises(UsageError, match=r"--lora_rank 2: .*nowhere"):
        add_lora(tiny_text_model(), LoraArguments(lora_rank=2, lora_modules=["nowhere"]))
    model = tiny_text_model()
    add_lora(model, LoraArguments())
    assert all(parameter.requires_grad for parameter in model.parameters())


def trained(rank: int = 2) -> SentenceTransformer:
    """A model whose adapters have made a step."""
    model = tiny_text_model()
    add_lora(model, LoraArguments(lora_rank=rank))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the first gives B a value, the second A
        CachedInfoNCELoss(model, mini_batch_size=4)(text_columns(model, 8), None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_what_is_saved_is_a_plain_model_with_the_adapters_in_its_weights(tmp_path):
    model, untrained = trained(), tiny_text_model().eval()
    model.save_pretrained(str(tmp_path), create_model_card=False)
    assert not any("adapter" in file.name for file in tmp_path.rglob("*"))
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    assert plain.state_dict().keys() == untrained.state_dict().keys()
    texts = ["w1 w2", "w3"]
    found, expected, before = (m.encode(texts, convert_to_tensor=True) for m in (plain, model, untrained))
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(before, expected, atol=1e-3)


def test_adapters_are_kept_in_the_replay_state_and_weights_on_loading_are_left_alone():
    model, other = trained(), tiny_text_model()
    add_lora(other, LoraArguments(lora_rank=2))
    other.load_state_dict(model.state_dict())  # merged: the layers' own weights stay what they were
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, LoraLayer):
            theirs.load_replay_state(mine.replay_state())
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    with pytest.raises(ValueError, match="The checkpoint has the adapter parameters"):
        next(m for m in other.modules() if isinstance(m, LoraLayer)).load_replay_state({})
