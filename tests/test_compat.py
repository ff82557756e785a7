"""The private names of dependencies: in one file, as expected, and missed with a message that helps."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from sentence_transformers.base.losses import gradcache

import st_cached_extras
from st_cached_extras import _compat

PACKAGE = Path(st_cached_extras.__file__).parent


def test_a_moved_helper_is_missed_with_a_message_that_says_what_to_do(monkeypatch):
    monkeypatch.delattr(gradcache, "_get_batch_size")
    with pytest.raises(ImportError, match=r"no longer has where 6.2 had it .*sentence-transformers>=6.2,<7"):
        importlib.reload(_compat)
    monkeypatch.undo()
    importlib.reload(_compat)


def test_the_helper_counts_rows():
    features = {"input_ids": torch.arange(6).view(3, 2), "attention_mask": torch.ones(3, 2), "modality": "text"}
    assert _compat.get_batch_size(features) == 3


def test_a_compiled_model_is_unwrapped():
    model = torch.nn.Linear(2, 2)
    assert _compat.uncompiled(torch.compile(model)) is model
    assert _compat.uncompiled(model) is model


def test_no_other_file_touches_a_private_name_of_a_dependency():
    pattern = re.compile(
        r"^\s*(from|import)\s+(sentence_transformers|transformers|accelerate|deepspeed|torch|datasets)\S*"
        r"(\._|.*import.*\b_[a-z])|\b_orig_mod\b",
        re.MULTILINE,
    )
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "_compat.py" and pattern.search(path.read_text())
    ]
    assert offenders == []
