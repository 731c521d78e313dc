"""Strict modes for every test: rank promotion raises, warnings are errors (pyproject), 8 CPU devices,
and a persistent compilation cache so that a second run compiles nothing."""

import gc
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # this one is read when jax is imported
os.environ.setdefault("MPLBACKEND", "agg")
CACHE = Path(os.environ.get("JAXPT_TEST_CACHE", Path(tempfile.gettempdir()) / f"jaxpt-test-cache-{os.getuid()}"))

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from jaxpt.lab.compiling import QUICK_TO_COMPILE  # noqa: E402

# Most of the suite's time is compilation. Programs run optimised elsewhere, smoke tiers aside.
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))

gc.set_threshold(50_000)  # a twelfth of the suite's time went into walks through what tracing leaves behind

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile(
    "core", max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("nightly", parent=settings.get_profile("core"), max_examples=500, derandomize=False)
settings.load_profile(os.environ.get("JAXPT_HYPOTHESIS", "core"))


@pytest.fixture(scope="module")
def compile_cache():
    """Runs, and the processes that they start, share the tests' cache of compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPT_CACHE", jax.config.jax_compilation_cache_dir)
        yield
