"""The step of a difference, from the layer itself: large enough to drown its noise, small enough for its curvature.

The derivative along a few directions is taken at every step of a ladder. Rounding and noise make neighbours disagree
at its lower end, curvature at its upper end; the step is taken where they agree best. (Moré & Wild 2012, "Estimating
derivatives of noisy simulations", balance the same two errors with a model of each.)
"""

from __future__ import annotations

import logging

import torch

from st_cached_extras.zbp.probes import Probes
from st_cached_extras.zbp.queries import Readout

logger = logging.getLogger(__name__)

# Relative to the RMS of a unit's input. Noisy, stepped and half-precision outputs end up at .1 to .5.
CENTRAL_LADDER = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4)
FORWARD_LADDER = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4)
DIRECTIONS = 4
DEFAULT_PARAMETER_EPS = 1e-2  # relative to the RMS of the parameters, where no step was chosen for the input


def choose_eps(readout: Readout, mode: str, eps_mode: str, generator: torch.Generator) -> float:
    """The step at which the derivative changes least to the next larger one. Its queries count as calibration.

    Args:
        readout: of the layer call.
        mode: "cd" or "fd".
        eps_mode: "relative", or "absolute": the ladder then is in units of the whole input's RMS.
        generator: of the directions.
    """
    before = readout.count.queries
    units, x = readout.units, readout.x
    u = units.as_inputs(Probes("rademacher", DIRECTIONS, units.count, units.size, generator).draw(0, DIRECTIONS))
    u = u.to(readout.dtype)
    difference, ladder = (readout.central, CENTRAL_LADDER) if mode == "cd" else (readout.forward, FORWARD_LADDER)
    scale = 1.0 if eps_mode == "relative" else float(x.to(readout.dtype).square().mean().sqrt())
    derivatives = []
    for step in ladder:
        steps = readout.steps(step * scale, eps_mode)
        derivatives.append(torch.cat([difference(direction, steps) for direction in u.split(1)]))
    D = torch.stack(derivatives)  # [steps, directions, ...]
    disagreement = D.diff(dim=0).flatten(1).square().mean(1).sqrt()
    typical = D.flatten(1).square().mean(1).sqrt().median().clamp_min(torch.finfo(D.dtype).tiny)
    relative = disagreement / typical
    best = int(relative.argmin())
    readout.count.calibration_queries += readout.count.queries - before
    readout.count.queries = before
    eps = ladder[best] * scale
    logger.info(
        f"eps = {eps:.3g} ({eps_mode}): the derivative changes by {float(relative[best]):.1e} to the next step."
    )
    return eps
