import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The layer .* is differentiable")
        yield
