"""The run folder: files are whole or absent, corruption is named, one writer at a time."""

import errno
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.lab import store
from jaxpt.lab.errors import UserError
from jaxpt.lab.worker import from_leaves, to_leaves

STATE = {
    "params": {"w": jnp.arange(6.0).reshape(2, 3), "empty": jnp.zeros((0, 2))},
    "half": jnp.asarray([1.5, -0.0, jnp.nan], jnp.bfloat16),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
    "step": jnp.asarray(7),
    "flag": jnp.asarray([True, False]),
}


OWNER = store.owner("s", 0)
BOUNDS = store.chunk_bounds(6, 2)


def chunk(first=0, state=True):
    metrics = {"loss": np.array([1.0, np.nan]), "x": np.arange(4.0).reshape(2, 2)}
    return store.Chunk(OWNER, first, 2, 0.5, metrics, to_leaves(STATE) if state else None)


def fill(folder, states):
    """Chunks 0, 1, ... of stage s and seed 0; states says which hold a state, None is a missing file."""
    for index, state in enumerate(states):
        if state is not None:
            store.save_chunk(store.chunk_path(folder, "s", 0, index), chunk(2 * index, state))


def test_a_state_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "c.npz"
    store.save_chunk(path, chunk())
    back = store.load_chunk(path)
    restored = from_leaves(back.state, jax.tree.structure(STATE))
    for a, b in zip(jax.tree.leaves(STATE), jax.tree.leaves(restored), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not getattr(b, "weak_type", False)
        data = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b)]
        assert np.asarray(data[0]).tobytes() == np.asarray(data[1]).tobytes()
    draws = [jax.random.uniform(state["keys"][1]) for state in (STATE, restored)]
    np.testing.assert_array_equal(*draws)
    for name, x in chunk().metrics.items():
        np.testing.assert_array_equal(back.metrics[name], x)


def test_a_state_with_one_array_twice_can_be_donated():
    x = jnp.ones(3)
    state = {"params": x, "reference": x}
    fresh = from_leaves(to_leaves(state), jax.tree.structure(state))
    jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0)(fresh)
    np.testing.assert_array_equal(x, 1.0)


@given(st.data())
def test_no_damage_goes_unnoticed(tmp_path_factory, data):
    """Any flipped bit or cut end gives the same arrays or a sentence that names the file."""
    path = tmp_path_factory.mktemp("chunk") / "c.npz"
    store.save_chunk(path, chunk())
    good, raw = store.load_chunk(path), bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[place:]
    path.write_bytes(raw)
    try:
        bad = store.load_chunk(path)
    except UserError as error:
        assert str(path) in str(error) and "delete it" in str(error)
        return
    np.testing.assert_equal(bad, good)


def test_dropping_the_state_keeps_the_metrics(tmp_path):
    path = tmp_path / "c.npz"
    store.save_chunk(path, chunk())
    store.drop_state(path)
    back = store.load_chunk(path)
    assert back.state is None
    np.testing.assert_equal(back.metrics, chunk().metrics)


@pytest.mark.parametrize("states, done", [
    ([], 0),
    ([True], 1),
    ([False, False, True], 3),
    ([False, True, True], 3),  # killed before the older state was dropped
    ([False, None, True], 0),  # a deleted file: the states before it are gone
    ([True, None, True], 1),
    ([None, False, True], 0),
    ([False, False, None], 0),  # the newest file deleted
])
def test_where_a_run_continues(tmp_path, states, done):
    fill(tmp_path, states)
    found, state = store.progress(tmp_path, "s", 0, OWNER, BOUNDS)
    assert found == done
    assert (state is None) == (done == 0)
    assert store.complete(tmp_path, {"s": 3}, 0) == (len(states) == 3 and None not in states)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("code, word", [(errno.ENOSPC, "free some space"), (errno.EACCES, "make it writ")])
def test_a_failing_disk_keeps_the_old_file(tmp_path, monkeypatch, broken, code, word):
    path = tmp_path / "file"
    store.write(path, lambda f: f.write(b"old"))

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(UserError, match=word) as caught:
        store.write(path, lambda f: f.write(b"new"))
    assert str(path) in str(caught.value) and "--resume" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_lock_keeps_two_writers_out_and_ends_with_its_holder(tmp_path):
    folder = tmp_path / "run"
    with store.locked(folder):
        leftover = folder / f"{store.TEMPORARY}1-x"
        leftover.write_text("half a file")
        with pytest.raises(UserError, match="another run"), store.locked(folder):
            pass
        assert leftover.exists()
    with store.locked(folder):
        assert not leftover.exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"), store.locked(tmp_path / "file" / "run"):
        pass


def test_half_written_folders(tmp_path):
    assert store.read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"runs": [')
    with pytest.raises(UserError, match="unreadable"):
        store.read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    fill(tmp_path, [True])
    with pytest.raises(UserError, match="no config.json"):
        store.read_config(tmp_path)


def test_resuming_needs_the_word_and_the_same_sources(tmp_path):
    same = {"the version of jax": "1", "the source files": "a"}
    earlier = {"must_agree": same}
    store.check_resumable(tmp_path, None, same, resume=True)
    store.check_resumable(tmp_path, earlier, same, resume=True)
    with pytest.raises(UserError, match="unfinished run.*--resume"):
        store.check_resumable(tmp_path, earlier, same, resume=False)
    (tmp_path / "report.md").touch()
    with pytest.raises(UserError, match="a finished run.*--resume"):
        store.check_resumable(tmp_path, earlier, same, resume=False)
    with pytest.raises(UserError, match="the source files changed"):
        store.check_resumable(tmp_path, earlier, same | {"the source files": "b"}, resume=True)


def test_json_has_no_nan(tmp_path):
    store.write_json(tmp_path / "x.json", {"a": [np.float32(np.nan), (1, Path("x").name)], "b": np.arange(2)})
    assert (tmp_path / "x.json").read_text().split() == '{ "a": [ null, [ 1, "x" ] ], "b": [ 0, 1 ] }'.split()


def test_chunk_bounds_cover_each_step_once():
    for steps in range(1, 9):
        for size in range(1, 10):
            bounds = store.chunk_bounds(steps, size)
            assert [first + i for first, n in bounds for i in range(n)] == list(range(steps))


@pytest.mark.parametrize("owner, bounds", [(store.owner("other", 0), (0, 2)), (store.owner("s", 1), (0, 2)), (OWNER, (2, 2))])
def test_a_chunk_in_another_s_place_is_refused(tmp_path, owner, bounds):
    path = tmp_path / "c.npz"
    store.save_chunk(path, chunk())
    assert store.load_own(path, OWNER, (0, 2)).steps == 2
    with pytest.raises(UserError, match="another stage's or seed's"):
        store.load_own(path, owner, bounds)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": []}', "not json"])
def test_a_damaged_config_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json is unreadable"):
        store.read_config(tmp_path)


def test_damaged_inputs_are_told_and_strays_are_no_seeds(tmp_path):
    (tmp_path / "inputs.npz").write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match="inputs.npz is corrupt"):
        store.read_inputs(tmp_path)
    (tmp_path / "chunks" / "s").mkdir(parents=True)
    (tmp_path / "chunks" / "s" / "foo-bar.npz").touch()
    assert store.seeds_on_disk(tmp_path) == []
