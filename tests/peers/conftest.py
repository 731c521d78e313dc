"""Other libraries as oracles. They live in an environment of their own, so each is imported where it is used."""

import importlib
import warnings

import jax
import pytest


@pytest.fixture
def peer():
    """peer("module") -> the module; the test is skipped where it is not installed."""

    def load(name: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a peer's import warns about is not ours to mend
            pytest.importorskip(name.split(".")[0], reason="needs .venv-peers: run scripts/test --peers")
            return importlib.import_module(name)

    with jax.numpy_rank_promotion("allow"):
        yield load
