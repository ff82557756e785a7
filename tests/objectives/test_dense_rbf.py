"""The objective with reference features that other tests use, against a double loop, through the inherited checks."""

import torch

from st_cached_extras.testing import ObjectiveCheckCase
from st_cached_extras.testing.dense_rbf import DenseRBF


class TestDenseRBF(ObjectiveCheckCase):
    def make_objective(self):
        return DenseRBF(learnable_width=True)

    def make_features(self, batch_size, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"image": (3,), "motion": (2, 2)}
        return {
            name: torch.randn(batch_size, *shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }

    def make_reference(self, batch_size, dtype, seed):
        return self.make_features(batch_size, dtype, seed + 1000)

    def dense_loss(self, features, *, objective, labels, reference):
        def kernel(a, b):
            return torch.exp(-0.5 * (a - b).square().sum() * torch.exp(-objective.log_width))

        def mean(first, second):
            return sum(kernel(a, b) for a in first for b in second) / (len(first) * len(second))

        pairs = [(x.flatten(1), reference[name].flatten(1)) for name, x in features.items()]
        return sum(mean(x, x) - 2 * mean(x, r) + mean(r, r) for x, r in pairs)
