"""The package imports without its extras, and carries what an installed package must."""

import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import st_cached_extras

BLOCKED = ("pytest", "av", "matplotlib", "torchvision", "peft", "deepspeed")


def test_the_package_imports_without_its_extras():
    modules = (
        "losses",
        "objectives",
        "replay",
        "distributed.trainer",
        "data",
        "testing.dense_rbf",
        "cards.model_card",
        "zbp",
        "zbp.ladder",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}));"
        + "import st_cached_extras;"
        + ";".join(f"import st_cached_extras.{module}" for module in modules)
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_it_is_typed_licensed_and_versioned():
    package = Path(st_cached_extras.__file__).parent
    assert (package / "py.typed").exists() and (package / "cards" / "template.md").exists()
    about = metadata("st-cached-extras")
    assert about["Version"] == st_cached_extras.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert {"video", "deepspeed", "dev"} == set(about.get_all("Provides-Extra"))
