"""Small layers and models in fp64, and their dense truth."""

import math

import torch
from torch import Tensor, nn

from st_cached_extras.zbp import ErrorTap, ZBPBlock, ZBPConfig


def mlp(size: int, out: int, seed: int = 0) -> nn.Sequential:
    """A non-linear layer that treats tokens alike."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, out)).double()


def backward(block: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """The input gradient that the module answers v with."""
    x = x.detach().clone().requires_grad_()
    block(x).backward(v)
    return x.grad


def memory(block: ZBPBlock, prefix: str) -> Tensor:
    """The one tensor that a layer keeps under a name that begins so, in fp64."""
    [found] = [value for key, value in block.zbp.memory.items() if key.startswith(prefix)]
    return found.double()


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def dense_jacobian(f, x: Tensor) -> Tensor:
    """[output size, input size] of one sample, entry by entry."""
    jacobian = torch.autograd.functional.jacobian(f, x)
    return jacobian.reshape(-1, math.prod(x.shape))


class TwoLayers(nn.Module):
    """y = W2 tanh(W1 x), the second layer in a block: what is wrapped is W2 with the loss above it."""

    def __init__(self, sizes: tuple[int, int, int], mode: str, seed: int = 0, name: str = "top", **changes) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(sizes[0], sizes[1], bias=False).double()
        second = nn.Linear(sizes[1], sizes[2], bias=False).double()
        self.second = ZBPBlock(second, ZBPConfig(mode=mode, **changes), name=name)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def tapped(sizes: tuple[int, int, int], mode: str, **kwargs) -> TwoLayers:
    model = TwoLayers(sizes, mode, **kwargs)
    ErrorTap(model)
    return model
