"""Signals meet inputs as the table says, and means count what is there."""

import pytest
import torch

from st_cached_extras.zbp import ZBPConfig
from st_cached_extras.zbp.estimators import LayerCall
from st_cached_extras.zbp.research.layout import FeedbackLayout
from tests.zbp.research.cases import relative

VALID = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool)[..., None]


def layout_of(x, signal, valid=None, **kwargs):
    call = LayerCall(f=torch.tanh, x=torch.zeros(x), v=torch.zeros(signal), config=ZBPConfig(mode="fa"), valid=valid)
    for name, value in kwargs.items():
        setattr(call, name, value)
    return FeedbackLayout(call, torch.Size(signal))


@pytest.mark.parametrize(
    ("x", "signal", "sizes"),
    [
        ((2, 4), (2, 3), (3, 4)),
        ((2, 5, 4), (2, 5, 3), (3, 4)),
        ((2, 5, 4), (2, 3), (3, 4)),
        ((2, 5, 4), (2, 3, 6), (18, 20)),
        ((2, 4), (2, 3, 6), (18, 4)),
        ((2, 3, 4, 4), (2, 3, 4, 4), (48, 48)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_matrices_are_as_large_as_features_wherever_that_makes_sense(x, signal, sizes, masked):
    valid = VALID if masked and len(x) == 3 else None
    layout = layout_of(x, signal, valid)
    assert layout.sizes == sizes
    e, z = torch.randn(signal, dtype=torch.float64), torch.randn(x, dtype=torch.float64)
    z = z if valid is None else z * valid
    matrix = torch.randn(sizes, dtype=torch.float64)
    carried, outer = torch.zeros_like(z), torch.zeros_like(matrix)
    rows = 0
    for b in range(2):
        if sizes[1] == 20 or len(x) != 3:  # a sample at a time
            carried[b] = (e[b].flatten() @ matrix).reshape(x[1:])
            outer += torch.outer(e[b].flatten(), z[b].flatten())
            rows += 1
            continue
        for t in range(5):
            if valid is None or valid[b, t]:
                of_token = e[b, t] if len(signal) == 3 else e[b]
                carried[b, t] = of_token @ matrix
                outer += torch.outer(of_token, z[b, t])
                rows += 1
    carried = carried if valid is None else carried * valid
    assert relative(layout.project(e, matrix), carried) <= 1e-12
    assert relative(layout.mean_outer(e, z), outer / rows) <= 1e-12


def test_every_token_counts_as_a_sample_where_the_layer_says_so():
    assert layout_of((2, 5, 4), (2, 5, 3), batch_dims=2).sizes == (3, 4)


def test_other_samples_are_refused():
    with pytest.raises(ValueError, match=r"carries a signal of shape \(3, 4\) to .* the leading 1 axes"):
        layout_of((2, 4), (3, 4))


def test_products_keep_their_dtype_under_autocast():
    layout = layout_of((2, 4), (2, 3))
    e, matrix = torch.randn(2, 3), torch.randn(3, 4)
    expected = e @ matrix
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layout.project(e, matrix), expected)
