"""Direct feedback: the error at the model's output, or its target, carried straight to a layer's input.

    dfa    Nøkland 2016, "Direct Feedback Alignment Provides Learning in Deep Neural Networks", arXiv 1609.01596,
           equation 7, e = d loss / d output of the model
    drtp   Frenkel, Lefebvre & Bol 2021, "Learning Without Feedback: Fixed Random Learning Signals Allow for
           Feedforward Training of Deep Neural Networks", arXiv 1909.01311: the target in place of the error, negated,
           since the error of the right class is negative whatever the output

The residual path around a layer is ignored, as in both papers: what arrives at the input is the whole gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from st_cached_extras.zbp.research.channels import transported
from st_cached_extras.zbp.research.feedback_alignment import carry
from st_cached_extras.zbp.research.layout import FeedbackLayout
from st_cached_extras.zbp.research.signal import output_error, signal_of

if TYPE_CHECKING:
    from st_cached_extras.zbp.estimators import LayerCall


def direct_feedback_alignment(call: LayerCall) -> Tensor:
    """The rule of mode dfa: g = scale · e B, e = d loss / d output of the model, B [K, C] fixed.

    Per token where the model's output is a sequence as long as the layer's input; else every token of a sample gets
    an equal share of e B. No query, no v.

    Raises:
        ValueError: no error of this forward is known.
    """
    error = transported(call, output_error(call))
    return carry(call, error, "dfa", FeedbackLayout(call, error.shape)).to(call.x.dtype)


def direct_random_target_projection(call: LayerCall) -> Tensor:
    """The rule of mode drtp: g = -scale · t B, t the target in the shape of the model's output, B [K, C] fixed.

    Raises:
        ValueError: no target of this forward is known.
    """
    signal = signal_of(call)
    if signal.target is None:
        raise ValueError(
            f"mode='drtp' needs a labelled loss, and the layer {call.name!r} was given no target for this forward. "
            "Tell the ErrorTap of the model: tap.watch(loss) takes the labels of every batch, tap.set_target(target) "
            "is for loops of your own. For losses without labels use mode='dfa'."
        )
    target = transported(call, signal.target.to(call.x.device))
    return -carry(call, target, "drtp", FeedbackLayout(call, target.shape)).to(call.x.dtype)
