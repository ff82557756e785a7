"""What `train_video_generator.py` does otherwise where Accelerate wraps the generator by DeepSpeed or FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn


def prepare(accelerator: Accelerator, generator: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> Any:
    """The generator and its optimizer as the engine wraps them; what goes in and comes out of it is in fp32."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return accelerator.prepare(generator, optimizer)
    # What is "auto" in its configuration is otherwise found from a DataLoader, and clipping is 1.
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 0.0,
    }
    wrapped, optimizer = accelerator.prepare(generator, optimizer)
    dtype = next(generator.parameters()).dtype
    generator.register_forward_pre_hook(lambda module, inputs: tuple(_floats_to(dtype, x) for x in inputs))
    generator.register_forward_hook(lambda module, inputs, scene: _floats_to(torch.float32, scene))
    return wrapped, optimizer


def _floats_to(dtype: torch.dtype, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(dtype) for name, x in named.items()}


def take_step(accelerator: Accelerator, generator: Any, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer, which DeepSpeed's engine does by itself, and forget the gradients."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        generator.step()
        return
    optimizer.step()
    optimizer.zero_grad()


def check_resume(accelerator: Accelerator, resume: bool) -> bool:
    """Whether checkpoints are written: they hold the generator and its optimizer as one process has them.

    Raises:
        ValueError: to resume is asked for where they are not.
    """
    whole = accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if resume and not whole:
        raise ValueError(
            "--resume: under FSDP2 and DeepSpeed, this script writes no checkpoints, as each device has its own part "
            "of the optimizer. Train to the end in one go, or under DistributedDataParallel."
        )
    if not whole:
        accelerator.print("No checkpoints are written under FSDP2 and DeepSpeed.")
    return whole
