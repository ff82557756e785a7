"""What one forward of a model leaves for the layers that are taught by its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


@dataclass(eq=False)
class Signal:
    """Of one forward; an :class:`~st_cached_extras.zbp.research.error_tap.ErrorTap` fills it.

    Attributes:
        error: d loss / d output, once its backward has begun.
        target: in the shape of the output, once that is there.
    """

    error: Tensor | None = None
    target: Tensor | None = None

    def receive(self, gradient: Tensor) -> None:
        self.error = gradient.detach()


def signal_of(call: LayerCall) -> Signal:
    """What the model's tap noted of the forward that this backward belongs to."""
    if call.signal is None:
        raise ValueError(
            f"mode={call.config.mode!r} is taught by the model's output, and the layer {call.name!r} ran outside of "
            "a forward that an ErrorTap watches. Call ErrorTap.of(model) on the model whose output has the loss "
            "(apply_zbp and set_mode do so), call the layer through that model, and do not checkpoint around it."
        )
    return call.signal


def output_error(call: LayerCall) -> Tensor:
    """d loss / d output of the model, of the forward that this backward belongs to."""
    error = signal_of(call).error
    if error is None:
        raise ValueError(
            f"mode={call.config.mode!r} needs d loss / d output of the model, which is not set: the loss reached the "
            f"layer {call.name!r} without passing the output that the ErrorTap watches. Give the tap the output that "
            "the loss is computed from: ErrorTap.of(model, output='token_embeddings')."
        )
    return error
