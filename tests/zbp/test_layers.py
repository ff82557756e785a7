"""Every family of layers, whole and in halves: the forward stays bit for bit, and the estimates are right."""

import inspect
import warnings

import pytest
import torch
import transformers
from torch import nn

from st_cached_extras.testing.tiny_models import gradients, relative_error
from st_cached_extras.zbp import ZBPConfig, apply_zbp, remove_zbp, zbp_blocks, zbp_stats
from st_cached_extras.zbp.arguments import CACHES
from st_cached_extras.zbp.estimators import exact

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
IMAGE = {"image_size": 16, "patch_size": 8}
IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 7, 9, 0, 0]])
MASK = (IDS != 0).long()


def text_inputs():
    return {"input_ids": IDS, "attention_mask": MASK}


def pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, **TEXT), add_pooling_layer=False), text_inputs()


def modernbert():
    config = transformers.ModernBertConfig(
        **SMALL, **TEXT, global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2
    )
    return transformers.ModernBertModel(config), text_inputs()


def decoder(name, **kwargs):
    config = getattr(transformers, f"{name}Config")(**SMALL, **TEXT, num_key_value_heads=1, **kwargs)
    return getattr(transformers, f"{name}Model")(config), text_inputs()


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, **IMAGE), add_pooling_layer=False), pixels()


def clip_vision():
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, **IMAGE)), pixels()


def clip_text():
    config = transformers.CLIPTextConfig(**SMALL, **TEXT, bos_token_id=1, eos_token_id=9)
    return transformers.CLIPTextModel(config), text_inputs()


def siglip_vision():
    config = transformers.SiglipVisionConfig(**SMALL, **IMAGE, vision_use_head=False)
    return transformers.SiglipVisionModel(config), pixels()


def videomae():
    config = transformers.VideoMAEConfig(**SMALL, **IMAGE, num_frames=4, tubelet_size=2)
    return transformers.VideoMAEModel(config), {"pixel_values": torch.randn(2, 4, 3, 16, 16)}


GRID = torch.tensor([[1, 4, 4], [1, 2, 4]])  # two images, packed: 16 and 8 patches


def qwen2_vl_vision():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4)
    model = Qwen2VisionTransformerPretrainedModel(config)
    return model, {"hidden_states": torch.randn(24, 3 * 2 * 4 * 4), "grid_thw": GRID}


def qwen3_vl_vision():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=16,
        patch_size=4,
        num_position_embeddings=16,
        deepstack_visual_indexes=[],
    )
    return Qwen3VLVisionModel(config), {"hidden_states": torch.randn(24, 3 * 2 * 4 * 4), "grid_thw": GRID}


def qwen_vl_text(kind):
    module = getattr(transformers.models, f"qwen{kind}_vl")
    prefix = f"Qwen{kind}VL"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    extra = {"head_dim": 8} if kind == 3 else {}
    config = getattr(module, f"{prefix}TextConfig")(
        **SMALL, **TEXT, num_key_value_heads=1, rope_parameters=rope, **extra
    )
    return getattr(module, f"{prefix}TextModel")(config), text_inputs()


FAMILIES = {
    "bert": (bert, "*.layer.1", ["*.layer.1.attention", "*.layer.1.intermediate"]),
    "modernbert": (modernbert, "layers.1", ["layers.1.attn", "layers.1.mlp"]),
    "qwen2": (lambda: decoder("Qwen2"), "layers.1", ["layers.1.self_attn", "layers.1.mlp"]),
    "qwen3": (lambda: decoder("Qwen3", head_dim=8), "layers.1", ["layers.1.self_attn", "layers.1.mlp"]),
    "qwen2_vl text": (lambda: qwen_vl_text(2), "layers.1", ["layers.1.self_attn", "layers.1.mlp"]),
    "qwen3_vl text": (lambda: qwen_vl_text(3), "layers.1", ["layers.1.self_attn", "layers.1.mlp"]),
    "qwen2_vl vision": (qwen2_vl_vision, "blocks.1", ["blocks.1.attn", "blocks.1.mlp"]),
    "qwen3_vl vision": (qwen3_vl_vision, "blocks.1", ["blocks.1.attn", "blocks.1.mlp"]),
    "vit": (vit, "*layer*.1", ["*layer*.1.attention", "*layer*.1.mlp"]),
    "clip vision": (clip_vision, "*.layers.1", ["*.layers.1.self_attn", "*.layers.1.mlp"]),
    "clip text": (clip_text, "*.layers.1", ["*.layers.1.self_attn", "*.layers.1.mlp"]),
    "siglip vision": (siglip_vision, "*.layers.1", ["*.layers.1.self_attn", "*.layers.1.mlp"]),
    "videomae": (videomae, "*.layer.1", ["*.layer.1.attention", "*.layer.1.intermediate"]),
}
CASES = [(name, pattern) for name, (_, whole, halves) in FAMILIES.items() for pattern in (whole, *halves)]


def hidden(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def make(name):
    torch.manual_seed(0)
    model, inputs = FAMILIES[name][0]()
    return model.eval(), inputs


def step(model, inputs):
    model.zero_grad()
    y = hidden(model(**inputs))
    weights = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    if y.shape[:2] == MASK.shape:
        weights = weights * MASK[..., None]
    (y * weights).sum().backward()
    return y.detach(), gradients(model)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The layer .* is differentiable")
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        yield


@pytest.mark.parametrize(("name", "pattern"), CASES)
def test_the_layer_is_wrapped_and_its_exact_rule_is_backprop(name, pattern):
    model, inputs = make(name)
    expected = step(model, inputs)
    [layer_name] = apply_zbp(model, pattern, ZBPConfig(mode="exact"))
    found = step(model, inputs)
    assert torch.equal(found[0], expected[0])
    assert relative_error(found[1], expected[1]) <= 1e-5
    assert zbp_stats(model)[layer_name]["backward_calls"] == 1
    remove_zbp(model)
    again = step(model, inputs)
    assert relative_error(again[1], expected[1]) <= 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_layers_estimate_the_gradient_below_them(name):
    """One unit's worth of orthogonal probes: as exact as differences are, whatever mixes inside a unit."""
    model, inputs = make(name)
    expected = step(model, inputs)
    config = ZBPConfig(mode="cd", param_mode="none", eps=1e-2, probe_chunk=64)
    [layer] = apply_zbp(model, FAMILIES[name][1], config).values()
    seen = {}
    layer.zbp.observer = lambda call, gradient: seen.update(call=call)
    step(model, inputs)
    call = seen["call"]
    size = 16 * 16 if call.segments is not None else call.x[0].numel()  # the larger image has 16 patches
    assert (call.segments is not None) == ("vision" in name and "qwen" in name)
    layer.zbp.configure(config.replace(n_probes=size))
    found = step(model, inputs)
    below = {k: v for k, v in expected[1].items() if _is_below(k, next(iter(zbp_blocks(model)))) and v.norm() > 0}
    assert below
    assert relative_error({k: found[1][k] for k in below}, below) <= 5e-3


HALVES = [
    ("bert", "*.layer.1.attention", "sample"),
    ("bert", "*.layer.1.intermediate", "token"),
    ("qwen2", "layers.1.self_attn", "sample"),
    ("qwen2", "layers.1.mlp", "token"),
    ("qwen3_vl text", "layers.1.self_attn", "sample"),
]


@pytest.mark.parametrize(("name", "pattern", "units"), HALVES)
def test_halves_estimate_the_gradient_below_them(name, pattern, units):
    """As many orthogonal probes as a unit has dimensions: a sample where tokens mix, else a token."""
    model, inputs = make(name)
    if "qwen" in name:
        inputs = {**inputs, "use_cache": True}
    expected = step(model, inputs)
    size = 16 if units == "token" else 16 * IDS.shape[1]
    config = ZBPConfig(mode="cd", param_mode="none", eps=1e-2, units=units, probe_chunk=16)
    [(layer_name, layer)] = apply_zbp(model, pattern, config.replace(n_probes=size)).items()
    arguments, outputs = [], []
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: arguments.extend([*kwargs.items(), *((None, each) for each in args)]),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    errors = []
    layer.zbp.observer = lambda call, gradient: errors.append(relative_error({"": gradient}, {"": exact(call)}))
    found = step(model, inputs)
    below = {key: g for key, g in expected[1].items() if (".0." in key or "embed" in key) and g.norm() > 0}
    assert len(below) > 8
    assert torch.equal(found[0], expected[0])
    assert relative_error({key: found[1][key] for key in below}, below) <= 5e-3
    assert errors[0] <= 5e-3
    assert zbp_stats(model)[layer_name]["queries"] == 2 * size
    if units == "sample":
        assert isinstance(outputs[0], tuple)
        assert any(isinstance(value, torch.Tensor) and value.shape[-2:] == (5, 5) for _, value in arguments)
        assert name == "bert" or any(key in CACHES and value is not None for key, value in arguments)
    layer.zbp.configure(config.replace(n_probes=size // 2))
    step(model, inputs)
    assert errors[1] > 0.5, "half of the probes leave a relative variance of 1"


def _is_below(parameter, layer):
    """Earlier in its stack than the layer of index 1."""
    stack = layer.rsplit(".", 1)[0]
    return parameter.startswith(f"{stack}.0.")


@pytest.mark.parametrize("name", ["bert", "qwen2", "qwen3", "modernbert", "clip text"])
def test_padding_gets_no_gradient_under_any_form_of_mask(name):
    model, inputs = make(name)
    pattern = FAMILIES[name][1]
    [layer_name] = apply_zbp(model, pattern, ZBPConfig(mode="cd", n_probes=4, eps=1e-2, param_mode="none"))
    seen = {}
    model.get_submodule(layer_name).zbp.observer = lambda call, gradient: seen.update(call=call, gradient=gradient)
    step(model, inputs)
    assert seen["call"].valid is not None
    assert torch.equal(seen["call"].valid[..., 0], MASK.bool())
    assert seen["gradient"][MASK == 0].count_nonzero() == 0
    assert (seen["gradient"][MASK == 1].abs().sum(-1) > 0).all()


def test_keys_and_values_get_backprop_s_gradients_although_a_cache_is_filled():
    for name in ("qwen2", "qwen3"):
        model, inputs = make(name)
        inputs = {**inputs, "use_cache": True}
        expected = step(model, inputs)
        apply_zbp(model, "layers.1", ZBPConfig(mode="cd", n_probes=2, eps=1e-2))
        found = step(model, inputs)
        assert torch.equal(found[0], expected[0])
        projections = [k for k in expected[1] if k.startswith("layers.1") and ("k_proj.w" in k or "v_proj.w" in k)]
        assert len(projections) == 2
        for key in projections:
            assert expected[1][key].norm() > 0
            assert relative_error({key: found[1][key]}, {key: expected[1][key]}) <= 1e-5
        cache = model(**inputs).cache
        assert cache.get_seq_length(1) == IDS.shape[1], "the forward itself fills the cache, once"


def test_a_cache_that_holds_earlier_tokens_is_refused():
    model, inputs = make("qwen2")
    cache = model(**inputs, use_cache=True).cache
    apply_zbp(model, "layers.1", ZBPConfig(mode="cd", n_probes=2, eps=1e-2))
    with pytest.raises(ValueError, match="holds 5 earlier positions"):
        model(input_ids=IDS, cache=cache, use_cache=True)


def test_packed_segments_do_not_see_each_other_s_probes():
    model, inputs = make("qwen3_vl vision")
    config = ZBPConfig(mode="cd", n_probes=128, eps=1e-2, param_mode="none", probe_chunk=64)
    [layer] = apply_zbp(model, "blocks.1", config).values()
    seen = {}
    layer.zbp.observer = lambda call, gradient: seen.update(call=call, gradient=gradient.clone())
    step(model, inputs)
    assert seen["call"].segments.tolist() == [0, 16, 24]
    # Both are probed in the larger image's 256 dimensions, of which 128 probes leave a relative variance of 1; the
    # smaller image has half of them, and half of the variance. One unit of all 384 would have 2.
    truth = torch.func.vjp(seen["call"].differentiable, seen["call"].x)[1](seen["call"].v)[0]
    errors = [
        relative_error({"": seen["gradient"][rows]}, {"": truth[rows]}) for rows in (slice(0, 16), slice(16, 24))
    ]
    assert errors[0] == pytest.approx(1.0, abs=1e-3)
    assert errors[1] == pytest.approx(0.5**0.5, abs=0.15)


def test_auto_skips_residual_layers_and_estimates_branches():
    decided = {}
    for name, patterns in (("qwen2", ["layers.1", "layers.0.mlp"]), ("vit", ["*layer*.1", "*layer*.0.mlp"])):
        model, inputs = make(name)
        for pattern in patterns:
            apply_zbp(model, pattern, ZBPConfig(n_probes=2, eps=1e-2))
        step(model, inputs)
        decided[name] = [block.zbp.mode for block in zbp_blocks(model).values()]
    assert all(sorted(modes) == ["cd", "skip"] for modes in decided.values()), decided


def test_halves_with_two_differentiable_inputs_are_refused_with_the_way_out():
    model, inputs = make("bert")
    apply_zbp(model, "*.layer.1.output", ZBPConfig(mode="cd", n_probes=2))
    with pytest.raises(ValueError, match=r"The argument 'input_tensor' .* is differentiable, too"):
        step(model, inputs)


def test_every_named_family_is_covered():
    named = "BERT ModernBERT Qwen2 Qwen3 Qwen2-VL Qwen3-VL ViT CLIP SigLIP VideoMAE"
    covered = {name.split()[0].replace("_", "-") for name in FAMILIES}
    assert {family.lower() for family in named.split()} == covered
    assert inspect.getsource(bert) and isinstance(make("bert")[0], nn.Module)
