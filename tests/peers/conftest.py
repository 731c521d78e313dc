"""Other libraries as oracles. They live in an environment of their own, so each is imported where it is used."""

import importlib
import warnings

import jax
import pytest
import wheels


@pytest.fixture(scope="session")
def peer():
    """peer("module") -> the module; the test is skipped where it is not installed."""
    patch = pytest.MonkeyPatch()

    def load(name: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a peer's import warns about is not ours to mend
            if name.split(".")[0] in wheels.STUBS:
                return wheels.load(name, patch)
            pytest.importorskip(name.split(".")[0], reason="needs .venv-peers: run scripts/test --peers")
            return importlib.import_module(name)

    yield load
    patch.undo()


@pytest.fixture(autouse=True)
def ranks():
    with jax.numpy_rank_promotion("allow"):  # as the peers need it
        yield
