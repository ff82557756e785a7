"""The host waits for the device a fixed number of times a step, however many mini-batches there are.

There is no device here, so what would lie on one is followed: the inputs, the parameters and all that is computed from
them. Whatever hands their content to the host would wait for the device.
"""

from collections import Counter

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from st_cached_extras import CachedInfoNCELoss, CachedLoss, CachedSigmoidLoss, CachedSupConLoss
from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference
from st_cached_extras.replay import FeatureGradientReplay
from st_cached_extras.testing.tiny_models import copy_columns, text_columns, tiny_text_model

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default)
WAITS_BY_METHOD = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy)
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class Waits:
    """Counts by name what would make the host wait for a device that holds the given tensors.

    Attributes:
        counts: how often, by operation.
        pause: while it is set, nothing is counted.
    """

    def __init__(self, tensors):
        self.counts, self.pause = Counter(), False
        self._storages = {}  # kept alive, so that no other takes their place
        self.put_on_device(tensors)
        self._modes = (_Operations(self), _Methods(self))

    def put_on_device(self, values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self._storages[value.untyped_storage()._cdata] = value.untyped_storage()

    def are_on_device(self, values):
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        return any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors)

    def count(self, name):
        self.counts[name] += not self.pause

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operations(TorchDispatchMode):
    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        on_device = self.waits.are_on_device((arguments, options))
        if on_device and (function in WAITS or _selects_by_mask(function, arguments)):
            self.waits.count(function.name())
        result = function(*arguments, **(options or {}))
        if on_device:
            self.waits.put_on_device(result)
        return result


class _Methods(TorchFunctionMode):
    """Those that are nothing at all for a tensor that lies on the host already."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function not in WAITS_BY_METHOD or not self.waits.are_on_device(arguments):
            return function(*arguments, **(options or {}))
        self.waits.count(function.__name__)
        moved = torch.from_numpy(arguments[0].detach().resolve_conj().numpy().copy())
        return moved if function is torch.Tensor.cpu else function(moved)


def _selects_by_mask(function, arguments):
    indexed = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
    return function in indexed and any(index is not None and index.dtype == torch.bool for index in arguments[1])


def waits_of_a_step(make_loss, labels=None, rows=16, columns=2):
    """What a step waits for outside the model's own forward."""
    model = tiny_text_model(dropout=0.1)
    loss = make_loss(model)
    inputs = copy_columns(text_columns(model, rows, columns))
    waits = Waits((list(loss.parameters()), inputs, labels))
    model.register_forward_pre_hook(lambda *_: setattr(waits, "pause", True))
    model.register_forward_hook(lambda *_: setattr(waits, "pause", False))
    with waits:
        loss(inputs, labels).backward()
    return dict(waits.counts)


def test_every_way_of_waiting_is_counted():
    x = torch.arange(4.0)
    host = torch.arange(4.0)
    with Waits([x]) as waits:
        y = x * 2 + host
        assert float(y.sum()) == 18.0
        if (y > 0).any():
            y.nonzero(), y[y > 1], torch.equal(y, host)
        assert y.tolist() == [0, 3, 6, 9] and y.cpu().sum() == 18 and y.numpy().sum() == 18
        float(host.sum()), host.tolist(), host[host > 1], y.cpu().tolist()
    assert sum(waits.counts.values()) == 2 + 3 + 3 + 1, waits.counts


# Once a column for the lengths of its rows, and once for all columns to see that the embeddings are finite.
LENGTHS_AND_FINITENESS = {"cpu": 2, "aten::_local_scalar_dense": 1}

LOSSES = {
    "InfoNCE": lambda model, **sizes: CachedInfoNCELoss(model, **sizes),
    "InfoNCE, all directions": lambda model, **sizes: CachedInfoNCELoss(model, directions=DIRECTIONS, **sizes),
    "InfoNCE, kept graphs": lambda model, **sizes: CachedInfoNCELoss(model, kept_graphs=0.5, **sizes),
    "sigmoid": lambda model, **sizes: CachedSigmoidLoss(model, learnable_scale=False, learnable_bias=False, **sizes),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "sizes", [{"mini_batch_size": 2}, {"mini_batch_size": 16}, {"mini_batch_num_tokens": 64}], ids=str
)
def test_a_step_waits_for_the_lengths_and_to_see_that_the_embeddings_are_finite(name, sizes):
    assert waits_of_a_step(lambda model: LOSSES[name](model, **sizes)) == LENGTHS_AND_FINITENESS


def test_a_learned_scale_is_read_once():
    found = waits_of_a_step(lambda model: CachedInfoNCELoss(model, learnable_scale=True, mini_batch_size=2))
    assert found == {"cpu": 2, "aten::_local_scalar_dense": 2}


@pytest.mark.parametrize(
    ("make_loss", "labels"),
    [
        (lambda model, size: CachedInfoNCELoss(model, mini_batch_size=size, differentiated_samples=8), None),
        (lambda model, size: CachedInfoNCELoss(model, mini_batch_size=size, labels_as_groups=True), torch.arange(16)),
        (lambda model, size: CachedSupConLoss(model, mini_batch_size=size), torch.arange(16) // 4),
        (lambda model, size: CachedLoss(CoSENTLoss(model), mini_batch_size=size), torch.linspace(0, 1, 16)),
    ],
    ids=["selection", "groups", "SupCon", "CoSENT"],
)
def test_more_mini_batches_wait_no_more_often(make_loss, labels):
    few, many = (waits_of_a_step(lambda model, size=size: make_loss(model, size), labels) for size in (16, 2))
    assert few == many and sum(few.values()) <= 6, (few, many)


@pytest.mark.parametrize("mini_batch", [2, 4, 16])
def test_the_protocol_waits_once_a_mini_batch_that_is_added_and_not_in_the_objective(mini_batch):
    references = {name: NystromReference.fit(torch.randn(32, 4), landmarks=8, name=name) for name in ("a", "b")}
    objective = MultiEncoderMMD(references)
    replay = FeatureGradientReplay(objective, target_local_samples=16, differentiated_local_samples=16)
    features = {name: torch.randn(16, 4) for name in references}
    waits = Waits(features)
    waits.put_on_device(list(objective.buffers()))
    with waits:
        for part in torch.arange(16).split(mini_batch):
            replay.add({name: x[part[0] : part[-1] + 1] for name, x in features.items()})
        added = sum(waits.counts.values())
        replay.finalize()
    assert added == 16 // mini_batch
    assert sum(waits.counts.values()) - added <= 2, waits.counts  # the loss, for the record of the step
