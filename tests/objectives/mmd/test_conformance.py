"""Numbers that another implementation of distribution matching computed (see ``vectors/``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from st_cached_extras.objectives.mmd import EncoderBalance, MultiEncoderMMD, NystromReference

VECTORS = Path(__file__).parent / "vectors"


@pytest.mark.parametrize("kind", ["nystrom", "exact"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_value_and_cotangent_are_those_of_another_implementation(number, kind):
    vectors = load_file(VECTORS / f"mmd_rdm_{number}.safetensors")
    z, alpha = vectors["landmarks"], vectors["alpha"]
    if kind == "exact":  # every row of the reference a landmark, with the same coefficient
        z, alpha = vectors["reference"], torch.full((len(vectors["reference"]),), 1 / len(vectors["reference"]))
    sigma, k_rr = float(vectors["sigma"]), float(vectors["k_rr"])
    reference = NystromReference.from_parts(landmarks=z, alpha=alpha, sigma=sigma, k_rr=k_rr)
    mmd = MultiEncoderMMD({"x": reference}, normalize=False)
    result = mmd.value_and_cotangents({"x": vectors["features"]})
    # Theirs is the difference of fp32 means near k_rr, with the rounding of those: relative to them.
    assert abs(result.loss - vectors[f"{kind}_loss"]) <= 1e-6 * k_rr
    theirs = vectors[f"{kind}_cotangent"]
    assert (result.cotangents["x"] - theirs).norm() <= 2e-6 * theirs.norm()
    # Ours keeps its precision relative to the difference, too.
    exact = mmd.double().value_and_cotangents({"x": vectors["features"].double()})
    assert abs(result.loss - exact.loss) <= 1e-6 * exact.loss


def test_landmarks_and_coefficients_are_those_of_another_implementation():
    vectors = load_file(VECTORS / "mmd_rdm_2.safetensors")  # every row a landmark: nothing to cluster
    fitted = NystromReference.fit(vectors["reference"], landmarks=64, scales=(1.0,))
    assert fitted.sigma[0] == pytest.approx(float(vectors["sigma"]), rel=1e-6)
    assert fitted.k_rr[0] == pytest.approx(float(vectors["k_rr"]), rel=1e-6)
    result = MultiEncoderMMD({"x": fitted}, normalize=False).value_and_cotangents({"x": vectors["features"]})
    theirs = vectors["nystrom_cotangent"]
    assert (result.cotangents["x"] - theirs).norm() <= 1e-4 * theirs.norm()


def test_the_balance_follows_the_trajectory_of_another_implementation():
    trajectory = json.loads((VECTORS / "encoder_balance_rdm.json").read_text())
    balance = EncoderBalance(
        trajectory["floors"],
        total=trajectory["total"],
        temperature=trajectory["temperature"],
        ema=trajectory["ema"],
    )
    for step in trajectory["steps"]:
        assert balance.update(step["scores"]) == pytest.approx(step["weights"], rel=1e-6)
