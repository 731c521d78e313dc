"""Modules of packages that cannot be installed here, imported file by file out of their wheels.

A package's own __init__ files are not run (they import what needs a GPU or a cluster): each becomes an empty package
that only has a path. What a wanted file imports beyond that is a stub, of which nothing that a test calls depends.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(sys.prefix) / "wheels"


class Config(SimpleNamespace):
    """A configuration: attributes, and `get` with a default."""

    def get(self, name, default=None):
        return getattr(self, name, default)


class Anything:
    def __init__(self, *args, **kwargs):
        pass


RAY = {"remote": lambda x: x, "is_initialized": lambda: False}
STUBS = {  # module -> what is taken from it
    "verl": {
        "tensordict": {"TensorDict": Anything},
        "verl.utils.device": {"get_device_name": lambda: "cpu", "get_torch_device": lambda: None},
        "verl.trainer.config": {"AlgoConfig": Anything},
        "verl.workers.config": {"ActorConfig": Config},
    },
    "openrlhf": {
        "deepspeed": {}, "ray": RAY,
        "openrlhf.trainer.ray.launcher": {"RayActorGroup": Anything},
        "openrlhf.trainer.ppo_utils.experience": {"Experience": Anything},
        "openrlhf.trainer.ppo_utils.length_penalty": {"apply_length_penalties": lambda experiences, args: None},
        "openrlhf.utils.logging_utils": {"init_logger": lambda name: None},
        "openrlhf.utils.seqlen_balancing": {
            "get_minimum_num_micro_batch_size": None, "get_seqlen_balanced_partitions": None,
        },
    },
    "skyrl": {
        "ray": RAY, "loguru": {"logger": SimpleNamespace(warning=lambda text: None)},
        "skyrl.train.config": {"AlgorithmConfig": Config},
    },
}  # fmt: skip
LATE = ("loguru",)  # imported inside of functions
PASSED_ON = {"verl": {"verl.utils": ("verl.utils.groupwise", ("as_torch_index", "group_mean_std"))}}


def load(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module of that full name. `patch` takes everything out of sys.modules again; stubs of other packages stand
    there only while the module is imported, so that nobody takes them for installed."""
    package = name.split(".")[0]
    if not (FOLDER / package).is_dir():
        pytest.skip("needs .venv-peers/wheels: run scripts/test --peers")
    stubs = STUBS[package]
    if package not in sys.modules:
        for folder in (FOLDER / package, *(FOLDER / package).rglob("*/")):
            _install(".".join(folder.relative_to(FOLDER).parts), {"__path__": [str(folder)]}, patch)
        for module in filter(lambda module: module.split(".")[0] in (package, *LATE), stubs):
            _install(module, stubs[module], patch)
    with pytest.MonkeyPatch.context() as during_import:
        for module in filter(lambda module: module not in sys.modules, stubs):
            _install(module, stubs[module], during_import)
        for module, (source, names) in PASSED_ON.get(package, {}).items():
            vars(sys.modules[module]).update({key: getattr(importlib.import_module(source), key) for key in names})
        return importlib.import_module(name)


def _install(name: str, contents: dict, patch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    patch.setitem(sys.modules, name, module)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
