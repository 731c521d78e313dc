"""Compiled programs on disk: built once, found by what they are made of, and the same function when they are loaded."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.lab import programs, store


def lower(salt=0.0):
    def scan(key, x):
        return jax.random.fold_in(key, 1), {"y": jnp.cumsum(x) + jax.random.uniform(key, x.shape) + salt}

    return jax.jit(scan).lower(jax.random.key(0), jnp.zeros(5))


def test_a_program_is_built_once_and_loaded_as_the_same_function(tmp_path):
    salt, lowered = np.random.default_rng().random(), []  # new to jax's own cache
    first, second = (programs.fetch(tmp_path, "p", lambda: lowered.append(lower(salt)) or lowered[-1], wait=False) for _ in range(2))
    assert len(lowered) == 1
    key, x = jax.random.key(7), jnp.arange(5.0)
    (new, out), (again, same) = first(key, x), second(key, x)
    assert (jax.random.key_data(new) == jax.random.key_data(again)).all()
    np.testing.assert_array_equal(out["y"], same["y"])


def test_what_jax_has_in_a_cache_of_its_own_is_not_stored_again(tmp_path):
    lower().compile()
    program = programs.fetch(tmp_path, "p", lower, wait=False)
    assert not (tmp_path / "p.program").exists()
    assert program(jax.random.key(7), jnp.arange(5.0))[1]["y"].shape == (5,)


def test_nobody_builds_what_another_is_building(tmp_path):
    with store.claimed(tmp_path / "p", False) as mine:
        assert mine
        assert programs.fetch(tmp_path, "p", lambda: pytest.fail("built twice"), wait=False) is None


def test_places_are_told_apart_by_what_they_are_made_of(tmp_path):
    one, same, other = (programs.place(tmp_path, tmp_path, {"sources": x}) for x in "aab")
    assert one == same != other and one.is_dir() and other.is_dir()
    old = time.time() - (programs.DAYS + 1) * 86400
    os.utime(other, (old, old))
    programs.place(tmp_path, tmp_path, {"sources": "a"})
    assert one.is_dir() and not other.exists()


def test_without_a_cache_programs_live_in_the_run_s_folder_and_a_killed_run_s_are_dropped(tmp_path):
    left = tmp_path / store.COMPILING / "p.program"
    store.write(left, lambda f: f.write(b"of another machine"))
    assert programs.place(None, tmp_path, {}) == left.parent and not left.exists()


def test_what_was_computed_is_kept(tmp_path):
    assert [programs.kept(tmp_path / "x", lambda k=k: {"x": (k,)}) for k in range(2)] == [{"x": (0,)}] * 2
