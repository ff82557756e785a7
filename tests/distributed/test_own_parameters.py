"""The losses' own optimizer: the groups it takes, the schedule it follows, the loss scale, its state."""

import pytest
import torch
from torch import nn

from st_cached_extras.distributed.own_parameters import LOSS_OPTIMIZER_FILE, LossOptimizer, split_groups


def make_optimizer(kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    groups = [{"params": parameters[:1], "lr": 0.1, "weight_decay": 0.5}, {"params": parameters[1:], "lr": 0.4}]
    return parameters, LossOptimizer(kind(groups, **options), learning_rate=0.2)


def test_groups_are_split_with_their_settings_and_none_is_empty():
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [first, second], "weight_decay": 0.5}, {"params": [third], "lr": 0.1}]
    others, owned = split_groups(groups, [second, third])
    assert others == [{"params": [first], "weight_decay": 0.5}]
    assert owned == [{"params": [second], "weight_decay": 0.5}, {"params": [third], "lr": 0.1}]
    assert groups[0]["params"] == [first, second]


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**12])
def test_a_step_follows_the_schedule_and_takes_the_loss_scale_out(loss_scale):
    parameters, optimizer = make_optimizer()
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = loss_scale * torch.ones_like(parameter)
    optimizer.step(learning_rate=0.1, loss_scale=loss_scale)  # half of what it was at the beginning
    torch.testing.assert_close(parameters[0].detach(), before[0] - 0.05 * (1.0 + 0.5 * before[0]))
    torch.testing.assert_close(parameters[1].detach(), before[1] - 0.2)
    assert all(parameter.grad is None for parameter in parameters)


def test_the_state_goes_through_a_folder(tmp_path):
    def step(parameters, optimizer, seed):
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(0.2)

    parameters, whole = make_optimizer(torch.optim.AdamW)
    step(parameters, whole, 1)
    whole.save(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [LOSS_OPTIMIZER_FILE]
    again, resumed = make_optimizer(torch.optim.AdamW)
    resumed.load(str(tmp_path))
    for mine, other in zip(again, parameters, strict=True):
        mine.data.copy_(other.data)
    step(parameters, whole, 2)
    step(again, resumed, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(again, parameters, strict=True))


def test_a_checkpoint_without_it_is_refused(tmp_path):
    _, optimizer = make_optimizer()
    with pytest.raises(ValueError, match="has no loss_optimizer"):
        optimizer.load(str(tmp_path))
