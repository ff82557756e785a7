"""A weighted sum of objectives, each on features of its own, through the inherited checks."""

import torch

from st_cached_extras.objectives import Composite, InfoNCE, SupCon
from st_cached_extras.testing import ObjectiveCheckCase
from st_cached_extras.testing.dense_rbf import DenseRBF
from tests.objectives.test_infonce import random_features, st_loss
from tests.objectives.test_supcon import double_loop


class TestComposite(ObjectiveCheckCase):
    def make_objective(self):
        ranking, classes = InfoNCE(scale=4.0, learnable_scale=True, chunk_size=4), SupCon(scale=3.0)
        return Composite({"ranking": (ranking, 0.5), "classes": (classes, -2.0), "cloud": (DenseRBF(), 3.0)})

    def make_features(self, batch_size, dtype, seed):
        generator = torch.Generator().manual_seed(seed + 50)
        of_classes = torch.randn(batch_size, 4, generator=generator, dtype=torch.float64).to(dtype)
        cloud = torch.randn(batch_size, 2, 3, generator=generator, dtype=torch.float64).to(dtype)
        ranking = random_features(batch_size, 5, 1, seed, dtype)
        return {
            **{f"ranking.{name}": x for name, x in ranking.items()},
            "classes.anchor": of_classes,
            "cloud.point": cloud,
        }

    def make_labels(self, batch_size, seed):
        return torch.arange(batch_size) % 3

    def make_reference(self, batch_size, dtype, seed):
        return {"cloud.point": self.make_features(batch_size, dtype, seed + 1000)["cloud.point"]}

    def dense_loss(self, features, *, objective, labels, reference):
        ranking = {name.split(".")[1]: x for name, x in features.items() if name.startswith("ranking")}
        log_scale = objective.objectives["ranking"].log_scale
        scaled = st_loss(
            ranking,
            scale=1.0,
            similarity_fct=lambda a, b: (
                log_scale.exp() * torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).T
            ),
        )
        classes = double_loop({"anchor": features["classes.anchor"]}, labels, scale=3.0)
        cloud = objective.objectives["cloud"]._of_branch(
            features["cloud.point"], reference["cloud.point"], torch.zeros(())
        )
        return 0.5 * scaled - 2.0 * classes + 3.0 * cloud
