"""A configuration is checked where it is made, by the name of the argument, and survives JSON."""

import dataclasses

import pytest

from st_cached_extras.zbp import Local, ZBPConfig


@pytest.mark.parametrize(
    "config",
    [
        ZBPConfig(),
        ZBPConfig(mode="fd", n_probes=7, probe="hadamard", eps=0.25, units=Local(2, 3), readout_noise=0.1),
        ZBPConfig(mode="cd", subspace="error", subspace_rank=2, control="fit", shrink="mmse", param_mode="zo", seed=3),
    ],
)
def test_it_makes_the_round_trip_through_json(config):
    assert ZBPConfig.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()


def test_replacing_makes_another_validated_one():
    config = ZBPConfig(mode="cd")
    assert config.replace(n_probes=3) == ZBPConfig(mode="cd", n_probes=3) and config.n_probes is None
    with pytest.raises(ValueError, match="n_probes must be at least 1"):
        config.replace(n_probes=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_probes = 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"mode": "feedback"},
            ValueError,
            "mode must be one of 'auto', 'bp', .*'cd', .*, got 'feedback'",
        ),
        ({"mode": "random feedback"}, ValueError, "mode must be one of"),
        ({"probe": "normal"}, ValueError, "probe must be one of 'orthogonal'"),
        ({"subspace": "half"}, ValueError, "subspace must be one of"),
        ({"control": "mean"}, ValueError, "control must be one of"),
        ({"eps_mode": "log"}, ValueError, "eps_mode must be one of"),
        ({"shrink": True}, ValueError, "shrink must be one of"),
        ({"param_mode": "global"}, ValueError, "param_mode must be one of"),
        ({"units": "row"}, ValueError, r"units must be one of 'sample', .* or Local\(radius, stride\), got 'row'"),
        ({"n_probes": 1.5}, TypeError, "n_probes must be an integer"),
        ({"n_probes": True}, TypeError, "n_probes must be an integer"),
        ({"probe_chunk": 0}, ValueError, "probe_chunk must be at least 1"),
        ({"subspace_rank": 0}, ValueError, "subspace_rank must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"eps": 0.0}, ValueError, "eps must be above 0"),
        ({"eps": float("inf")}, ValueError, "eps must be above 0"),
        ({"eps": "1e-3"}, TypeError, "eps must be a number"),
        ({"readout_noise": -0.1}, ValueError, "readout_noise must be at least 0"),
        ({"mask_padding": 1}, TypeError, "mask_padding must be True or False"),
        ({"subspace": "error", "units": "token"}, ValueError, "subspace='error' takes the singular vectors"),
        ({"units": Local(1), "control": "fit"}, ValueError, "control='fit' needs units that do not overlap"),
        ({"units": Local(1), "control": "local"}, ValueError, "control='local' needs units that do not overlap"),
        ({"units": Local(1), "shrink": "mmse"}, ValueError, "shrink='mmse' needs units that do not overlap"),
        ({"units": Local(1), "mode": "oracle"}, ValueError, "mode='oracle' needs units that do not overlap"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        ZBPConfig(**arguments)


@pytest.mark.parametrize("arguments", [{"radius": -1}, {"radius": 1, "stride": 0}])
def test_local_units_are_checked_too(arguments):
    with pytest.raises(ValueError, match=r"Local\.\w+ must be at least"):
        Local(**arguments)


@pytest.mark.parametrize("text", ['{"modus": "cd"}', "[1, 2]"])
def test_the_json_of_something_else_is_refused(text):
    with pytest.raises(ValueError, match="Not the JSON of a ZBPConfig"):
        ZBPConfig.from_json(text)
