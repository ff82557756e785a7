"""Reference files: what is written comes back; what is no whole reference is refused, and nothing executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from st_cached_extras.objectives.mmd import MultiEncoderMMD, NystromReference, ReferenceFileError
from st_cached_extras.objectives.mmd.reference_file import KEY


@pytest.fixture
def reference() -> NystromReference:
    features = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(0)) + 2
    return NystromReference.fit(features, landmarks=9, layout="per_token", name="dino/v2", identity={"encoder": "é"})


@pytest.fixture
def path(reference, tmp_path) -> Path:
    reference.save(tmp_path / "dino.safetensors")
    return tmp_path / "dino.safetensors"


def test_what_is_saved_comes_back_bit_for_bit(reference, path):
    loaded = NystromReference.load(path)
    assert loaded.describe() == reference.describe() and repr(loaded) == repr(reference)
    features = {"x": torch.randn(7, 3, 4)}
    results = [MultiEncoderMMD({"x": each}).value_and_cotangents(features) for each in (reference, loaded)]
    assert torch.equal(results[0].loss, results[1].loss)
    assert torch.equal(results[0].cotangents["x"], results[1].cotangents["x"])


def test_equal_references_are_equal_files(reference, path):
    other = path.with_name("other.safetensors")
    NystromReference.load(path).save(other)
    assert other.read_bytes() == path.read_bytes()


def test_a_write_that_fails_leaves_the_old_file(reference, path, monkeypatch):
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("st_cached_extras.objectives.mmd.reference_file.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        reference.save(path)
    assert path.read_bytes() == before


def rewritten(path: Path, tensors=None, **fields) -> None:
    """The file with some tensors and fields replaced; a field of ... is left out."""
    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()[KEY])
    header = {name: value for name, value in (header | fields).items() if value is not ...}
    new = {name: value for name, value in (old | (tensors or {})).items() if value is not ...}
    save_file(new, path, metadata={KEY: json.dumps(header)})


def checksummed(path: Path, tensors: dict, **fields) -> None:
    """As :func:`rewritten`, with the checksum that fits, as somebody else's program might write it."""
    from st_cached_extras.objectives.mmd.reference_file import _checksum

    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rewritten(path, tensors, checksum=_checksum(old | tensors), **fields)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


BAD_FILES = {
    "empty": (lambda path: path.write_bytes(b""), "safetensors"),
    "text": (lambda path: path.write_text("not a reference"), "safetensors"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Bomb(path.parent / "bomb"))), "safetensors"),
    "torch checkpoint": (lambda path: torch.save({"x": Bomb(path.parent / "bomb")}, path), "safetensors"),
    "truncated header": (lambda path: path.write_bytes(path.read_bytes()[:100]), "safetensors"),
    "truncated tensors": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "safetensors"),
    "longer than it says": (lambda path: path.write_bytes(path.read_bytes() + b"more"), "safetensors"),
    "a flipped bit": (flip_a_bit, "damaged"),
    "foreign safetensors": (lambda path: save_file({"weight": torch.ones(2)}, path), "something else"),
    "another format's metadata": (
        lambda path: save_file({"weight": torch.ones(2)}, path, metadata={"format": "pt"}),
        "something else",
    ),
    "description not JSON": (lambda path: save_file({"x": torch.ones(2)}, path, metadata={KEY: "{"}), "not JSON"),
    "description a list": (lambda path: save_file({"x": torch.ones(2)}, path, metadata={KEY: "[]"}), "no version"),
    "no version": (lambda path: rewritten(path, version=...), "no version"),
    "a later version": (lambda path: rewritten(path, version=2), "version 2.*version 1"),
    "a missing field": (lambda path: rewritten(path, sigma=...), r"misses \['sigma'\]"),
    "an unknown field": (lambda path: rewritten(path, temperature=1), r"unknown \['temperature'\]"),
    "a field of the wrong type": (lambda path: rewritten(path, sigma="wide"), "sigma is 'wide'"),
    "a text for a size": (lambda path: rewritten(path, condition_size="2"), "condition_size is '2'"),
    "identity not texts": (lambda path: rewritten(path, identity={"a": 1}), "identity is"),
    "an unknown kernel": (lambda path: rewritten(path, kernel="cosine"), "kernel: found 'cosine'"),
    "an unknown layout": (lambda path: rewritten(path, layout="rows"), "layout: found 'rows'"),
    "scales that do not fit": (lambda path: rewritten(path, scales=[1.0]), r"alpha: shape \[3, 3, 9\]"),
    "a scale of zero": (lambda path: rewritten(path, scales=[0.5, 1, 0]), "scales: found"),
    "too few bandwidths": (lambda path: rewritten(path, sigma=[1.0]), "sigma: found"),
    "a negative bandwidth": (lambda path: rewritten(path, sigma=[1.0, -1.0, 1.0]), "sigma: found"),
    "not a finite number": (lambda path: rewritten(path, k_rr=[0.1, float("nan"), 0.1]), "k_rr: found"),
    "another row shape": (lambda path: rewritten(path, sample_shape=[4, 3]), r"sample_shape: found \[4, 3\]"),
    "a missing tensor": (lambda path: rewritten(path, {"alpha": ...}), r"tensors \['center', 'landmarks'\]"),
    "an unknown tensor": (lambda path: rewritten(path, {"beta": torch.ones(2)}), "tensors .*'beta'"),
    "another dtype": (lambda path: rewritten(path, {"alpha": torch.ones(3, 3, 9).half()}), "alpha are torch.float16"),
    "another checksum": (lambda path: rewritten(path, checksum="00"), "damaged"),
    "landmarks of another shape": (
        lambda path: checksummed(path, {"landmarks": torch.ones(3, 8, 4)}),
        r"alpha: shape \[3, 3, 9\], expected \[3, 3, 8\]",
    ),
    "non-finite landmarks": (
        lambda path: checksummed(path, {"landmarks": torch.full((3, 9, 4), torch.inf)}),
        "landmarks: found NaN or infinity",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_whole_reference_is_refused_by_reason(kind, path):
    spoil, reason = BAD_FILES[kind]
    spoil(path)
    with pytest.raises(ReferenceFileError, match=rf"dino\.safetensors.*{reason}.*make a new one"):
        NystromReference.load(path)
    assert not (path.parent / "bomb").exists(), "nothing is unpickled"


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        NystromReference.load("nowhere.safetensors")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        NystromReference.load(tmp_path)
