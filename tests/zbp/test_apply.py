"""Layers of a model get an estimated backward and lose it again; names, files, copies and adapters notice nothing."""

import copy
import pickle
import warnings

import peft
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer

from st_cached_extras import CachedInfoNCELoss, ReplaySentenceTransformerTrainer
from st_cached_extras.distributed.trainer import LOSS_STATE_FILE
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    random_sentences,
    relative_error,
    text_columns,
    tiny_text_model,
)
from st_cached_extras.zbp import ZBPBlock, ZBPConfig, apply_zbp, remove_zbp, zbp_blocks, zbp_stats

CONFIG = ZBPConfig(mode="cd", n_probes=4, eps=1e-2)
TOP = "0.model.encoder.layer.1"


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The layer .* is differentiable")
        yield


def embed(model, columns, seed=3):
    torch.manual_seed(seed)
    return model(copy_columns(columns)[0])["sentence_embedding"]


def step(model, columns):
    """Embeddings, parameter gradients and the random state after one forward and backward of an odd loss."""
    model.zero_grad()
    e = embed(model, columns)
    (e * torch.arange(e.numel()).view_as(e).sin()).sum().backward()
    return e.detach(), gradients(model), torch.get_rng_state()


def part(gradients_by_name, text):
    return {name: g for name, g in gradients_by_name.items() if text in name}


def test_with_dropout_the_top_layer_s_parameters_get_backprop_s_gradients_and_nothing_else_changes():
    model = tiny_text_model(dropout=0.2)
    columns = text_columns(model, 6)
    expected = step(model, columns)
    apply_zbp(model, [-1], CONFIG)
    found = step(model, columns)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    assert relative_error(part(found[1], "layer.1."), part(expected[1], "layer.1.")) <= 1e-5
    below = relative_error(part(found[1], "layer.0."), part(expected[1], "layer.0."))
    assert below > 0.1, "four probes of hundreds of dimensions cannot be exact: nothing was estimated"


def test_names_classes_and_files_stay_what_they_were(tmp_path):
    model = tiny_text_model().eval()
    keys, own = list(model.state_dict()), type(model.get_submodule(TOP))
    expected = model.encode(["w1 w2 w3", "w4"])
    layers = apply_zbp(model, [1], CONFIG)
    assert list(layers) == list(zbp_blocks(model)) == [TOP]
    assert list(model.state_dict()) == keys
    assert isinstance(model.get_submodule(TOP), BertLayer) and type(model.get_submodule(TOP)) is not own
    model.save_pretrained(str(tmp_path), create_model_card=False)
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    assert type(plain.get_submodule(TOP)) is own
    assert (plain.encode(["w1 w2 w3", "w4"]) == expected).all()

    remove_zbp(model)
    assert type(model.get_submodule(TOP)) is own and zbp_blocks(model) == {}
    assert not {"zbp", "zbp_local"} & vars(model.get_submodule(TOP)).keys()
    remove_zbp(model)  # nothing to do is fine
    apply_zbp(model, [1], CONFIG)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_independent(copier):
    model = tiny_text_model()
    columns = text_columns(model, 4)
    apply_zbp(model, [-1], CONFIG)
    twin = copier(model)
    expected, found = step(model, columns), step(twin, columns)
    assert relative_error(found[1], expected[1]) == 0.0
    step(twin, columns)
    assert zbp_stats(model)[TOP]["backward_calls"] == 1 and zbp_stats(twin)[TOP]["backward_calls"] == 2
    remove_zbp(twin)
    assert zbp_blocks(twin) == {} and list(zbp_blocks(model)) == [TOP]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([0], ["0.model.encoder.layer.0"]),
        ([0, -1], ["0.model.encoder.layer.0", TOP]),
        ("*.layer.1", [TOP]),
        (["*.layer.0.intermediate", TOP], ["0.model.encoder.layer.0.intermediate", TOP]),
        (BertLayer, ["0.model.encoder.layer.0", TOP]),
        ((BertLayer, nn.Embedding), None),
    ],
)
def test_layers_are_named_by_index_pattern_or_class(layers, expected):
    model = tiny_text_model()
    found = apply_zbp(model, layers, CONFIG)
    assert expected is None or list(found) == expected
    assert found == zbp_blocks(model)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("*.layer.9", ValueError, "matches none of the model's"),
        (nn.Conv2d, ValueError, "matches none of the model's"),
        ([7], ValueError, "has the index 7, but 0.model.encoder.layer has 2 layers"),
        ([], TypeError, "layers must be a pattern"),
        (3, TypeError, "layers must be a pattern"),
        ([1, "a"], TypeError, "layers must be a pattern"),
        (["*.layer.0", "*.layer.0.attention"], ValueError, "one inside the other"),
        ("no_backward", ValueError, "give batch="),
    ],
)
def test_wrong_layers_are_refused_and_change_nothing(layers, error, message):
    model = tiny_text_model()
    with pytest.raises(error, match=message):
        apply_zbp(model, layers, CONFIG)
    assert zbp_blocks(model) == {}


def test_layers_are_wrapped_once_and_not_inside_each_other():
    model = tiny_text_model()
    apply_zbp(model, [0], CONFIG)
    with pytest.raises(ValueError, match=r"has an estimated backward already. Call remove_zbp"):
        apply_zbp(model, [0], CONFIG)
    for inner_or_outer in ("*.layer.0.attention", "0.model.encoder"):
        with pytest.raises(ValueError, match="one inside the other"):
            apply_zbp(model, inner_or_outer, CONFIG)


def test_two_lists_of_layers_need_a_pattern():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=r"it has 2 such lists \(0, 1\)"):
        apply_zbp(model, [0], CONFIG)


def test_a_config_and_a_class_changed_since_are_refused():
    model = tiny_text_model()
    with pytest.raises(TypeError, match="config must be a ZBPConfig"):
        apply_zbp(model, [0], "cd")
    [layer] = apply_zbp(model, [0], CONFIG).values()
    layer.__class__ = type("Sharded", (type(layer),), {})
    with pytest.raises(TypeError, match="was changed again after apply_zbp, to Sharded"):
        remove_zbp(model)


def test_queries_are_counted_by_layer():
    model = tiny_text_model()
    columns = text_columns(model, 4)
    for mode, each in (("cd", 8), ("fd", 5), ("jvp", 4), ("skip", 0)):
        apply_zbp(model, [0, 1], CONFIG.replace(mode=mode, param_mode="none"))
        step(model, columns)
        step(model, columns)
        assert zbp_stats(model).keys() == {"0.model.encoder.layer.0", TOP}
        for of_layer in zbp_stats(model).values():
            assert of_layer.pop("seconds") > 0
            assert of_layer == {
                "queries": 2 * each,
                "parameter_queries": 0,
                "calibration_queries": 0,
                "exact_backwards": 0,
                "backward_calls": 2,
            }
        remove_zbp(model)
    assert zbp_stats(model) == {}


def test_blocks_of_one_s_own_are_found_and_stay():
    model = nn.Sequential(nn.Linear(3, 3), ZBPBlock(torch.tanh, CONFIG.replace(param_mode="none")))
    model(torch.randn(2, 3)).sum().backward()
    assert list(zbp_blocks(model)) == ["1"] and zbp_stats(model)["1"]["queries"] == 8
    remove_zbp(model)
    assert list(zbp_blocks(model)) == ["1"]


def test_padding_gets_no_gradient():
    model = tiny_text_model()
    columns = [model.preprocess(["w1 w2 w3 w4 w5 w6", "w1 w2", "w3"])]
    seen = []
    model.get_submodule("0.model.encoder.layer.0").register_forward_hook(
        lambda module, args, out: out.register_hook(seen.append) and None
    )
    apply_zbp(model, [-1], CONFIG)
    step(model, columns)
    padding = columns[0]["attention_mask"] == 0
    assert padding.sum() == 9
    assert seen[0][padding].count_nonzero() == 0
    assert (seen[0][~padding].abs().sum(-1) > 0).all()


def test_two_batches_of_different_lengths_in_a_row():
    model = tiny_text_model()
    apply_zbp(model, [-1], CONFIG)
    for longest in (5, 17, 3):
        _, found, _ = step(model, [model.preprocess(random_sentences(4, 1, longest))])
        assert all(bool(g.isfinite().all()) for g in found.values())


def test_hidden_states_are_those_of_the_plain_model():
    model = tiny_text_model().eval()
    features = model.preprocess(["w1 w2 w3", "w4"])
    bert = model[0].model
    inputs = {"input_ids": features["input_ids"], "attention_mask": features["attention_mask"]}
    expected = bert(**inputs, output_hidden_states=True).hidden_states
    apply_zbp(model, [0, 1], CONFIG)
    found = bert(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    found[-1].sum().backward()
    assert zbp_stats(model)[TOP]["queries"] == 8


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    model = tiny_text_model(dropout=0.1)
    columns = text_columns(model, 4)
    apply_zbp(model, [-1], CONFIG)
    expected = step(model, columns)
    model[0].model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model[0].model.enable_input_require_grads()
    for layer in zbp_blocks(model).values():
        layer.zbp.calls = 0
    found = step(model, columns)
    assert torch.equal(found[0], expected[0])
    assert relative_error(found[1], expected[1]) <= 1e-6
    assert zbp_stats(model)[TOP]["backward_calls"] == 1


def test_lora_trains_inside_a_wrapped_layer_and_below_it():
    model = tiny_text_model()
    columns = text_columns(model, 4)
    config = peft.LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model[0].model)
    expected = step(model, columns)
    apply_zbp(model, "*.layer.1", CONFIG)
    found = step(model, columns)
    assert torch.equal(found[0], expected[0])
    adapters = {name: g for name, g in found[1].items() if "lora" in name}
    assert adapters and all(g.norm() > 0 for g in adapters.values())
    assert relative_error(part(adapters, "layer.1."), part(part(expected[1], "lora"), "layer.1.")) <= 1e-5


def test_a_cached_loss_estimates_what_a_plain_one_does():
    columns = None
    results = []
    # A whole basis of rademacher-free probes would cost thousands of queries: the rules that are deterministic do.
    for loss_class, kwargs in ((MultipleNegativesRankingLoss, {}), (CachedInfoNCELoss, {"mini_batch_size": 2})):
        model = tiny_text_model()
        columns = text_columns(model, 6) if columns is None else columns
        apply_zbp(model, [-1], ZBPConfig(mode="skip"))
        loss_class(model, **kwargs)(copy_columns(columns), None).backward()
        results.append(gradients(model))
    assert relative_error(results[1], results[0]) <= 1e-5

    model = tiny_text_model(dropout=0.2)
    apply_zbp(model, [-1], CONFIG)
    loss = CachedInfoNCELoss(model, mini_batch_size=2)
    loss(copy_columns(columns), None).backward()
    assert zbp_stats(model)[TOP] | {"seconds": 0} == {
        "queries": 6 * 8,  # three mini-batches of each of two columns
        "parameter_queries": 0,
        "calibration_queries": zbp_stats(model)[TOP]["calibration_queries"],
        "exact_backwards": 0,
        "backward_calls": 6,
        "seconds": 0,
    }
    truth = tiny_text_model(dropout=0.2)
    truth.load_state_dict(model.state_dict())
    assert all(bool(g.isfinite().all()) for g in gradients(model).values())


def make_trainer(model, folder, **kwargs):
    dataset = Dataset.from_dict({"anchor": random_sentences(64, 1), "positive": random_sentences(64, 2)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_steps=2,
        max_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **kwargs,
    )
    loss = CachedInfoNCELoss(model, mini_batch_size=4)
    return ReplaySentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    """With accumulation, dropout, and a step that was chosen before the checkpoint."""
    results = []
    for folder, resume, seed in (("whole", None, 0), ("resumed", "whole/checkpoint-2", 5)):
        model = tiny_text_model(dropout=0.1, seed=seed)
        apply_zbp(model, [-1], CONFIG.replace(eps=None))
        trainer = make_trainer(model, tmp_path / folder, gradient_accumulation_steps=2)
        trainer.train(None if resume is None else str(tmp_path / resume))
        results.append((dict(model.named_parameters()), model.get_submodule(TOP).zbp))
    (whole, state), (resumed, resumed_state) = results
    assert relative_error(resumed, whole) == 0.0
    assert resumed_state.calls == state.calls == 4 * 2 * 4 and resumed_state.eps == state.eps
    assert (tmp_path / "whole" / "checkpoint-2" / LOSS_STATE_FILE).exists()
    plain = SentenceTransformer(str(tmp_path / "whole" / "checkpoint-4"), device="cpu")
    assert zbp_blocks(plain) == {}


def test_mini_steps_that_accumulate_add_up_to_the_sum_of_their_gradients():
    model = tiny_text_model(dropout=0.1)
    [layer] = apply_zbp(model, [-1], CONFIG).values()
    batches = [[model.preprocess(random_sentences(3, seed))] for seed in range(3)]

    def backward(k):
        e = embed(model, batches[k], seed=k)
        (e * torch.arange(e.numel()).view_as(e).sin()).sum().backward()

    def alone(k, call):
        model.zero_grad()
        layer.zbp.calls = call
        backward(k)
        return gradients(model)

    for k in range(3):
        backward(k)
    accumulated = gradients(model)
    assert layer.zbp.calls == 3
    for calls, same in (((0, 1, 2), True), ((0, 0, 0), False)):
        each = [alone(k, call) for k, call in enumerate(calls)]
        error = relative_error(accumulated, {name: sum(g[name] for g in each) for name in accumulated})
        assert error <= 1e-6 if same else error > 0.05, "every mini-step draws its own probes"


def test_several_differentiable_layers_warn_once_a_model():
    model = tiny_text_model()
    apply_zbp(model, [0, 1], CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, text_columns(model, 3))
    assert sum("ZBP is for layers without a usable backward" in str(w.message) for w in caught) == 1
