"""The table of objectives as a whole: what is said of every row, that no two are one, and every row under jit, vmap,
jax.checkpoint, shard_map and pmap: one value and one gradient.

The probe batch of a family has 8 rows: on 8 virtual devices each holds one, with the denominators of all of them. One
compiled program a transform, over all additive rows of a family.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpt.cli import main
from jaxpt.objectives import ROWS
from jaxpt.objectives.families import FAMILIES
from jaxpt.objectives.probe import Case, probe_case, value_and_grads
from jaxpt.train.parallel import DATA, make_mesh

OWN = {name: row for name, row in ROWS.items() if "." not in name}  # other libraries': tests/test_peer_rows.py
DEVICES = 8
UNPUBLISHED = ("grpo_token_weights",)  # rows without a paper


@functools.cache
def of_family(family, reward_scale=1.0):
    """name -> its arguments on the probe batch, made by one program."""
    rows = {name: row for name, row in OWN.items() if row.family == family}
    return jax.jit(lambda scale: {name: probe_case(row, scale) for name, row in rows.items()})(reward_scale)


def additive(family):
    return {name: case for name, case in of_family(family).items() if ROWS[name].additive}


def plain(cases):
    return {name: value_and_grads(ROWS[name], case) for name, case in cases.items()}


def vmapped(cases):
    """Twice the same batch, the losses computed again in the backward pass: both must come out as one."""
    again = lambda row: row._replace(loss=jax.checkpoint(row.loss))  # noqa: E731
    run = lambda cases: {name: value_and_grads(again(ROWS[name]), case) for name, case in cases.items()}  # noqa: E731
    return jax.tree.map(lambda x: x[1], jax.vmap(run)(jax.tree.map(lambda x: jnp.stack([x, x]), cases)))


def summed(cases):
    """On one share of the rows: losses are summed over shares; gradients, and values by row, lie side by side."""
    out = plain(cases)
    return {name: (value if value.ndim else jax.lax.psum(value, DATA), grads) for name, (value, grads) in out.items()}


def layout(cases):
    """How the tree of cases is cut, and its results are put together."""
    cut = {name: Case(P(DATA), P(DATA), P()) for name in cases}
    back = {name: (P(DATA) if ROWS[name].family == "length_shaping" else P(), P(DATA)) for name in cases}
    return cut, back


def sharded(cases):
    cut, back = layout(cases)
    return jax.shard_map(summed, mesh=make_mesh(DEVICES), in_specs=(cut,), out_specs=back, check_vma=False)(cases)


def pmapped(cases):
    split = lambda tree: jax.tree.map(lambda x: x.reshape(DEVICES, 1, *x.shape[1:]), tree)  # noqa: E731
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (DEVICES, *jnp.shape(x))), tree)  # noqa: E731
    cases = {name: Case(split(moving), split(rows), copies(shared)) for name, (moving, rows, shared) in cases.items()}
    out = jax.pmap(summed, axis_name=DATA)(cases)
    whole = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    return {
        name: (whole(value) if ROWS[name].family == "length_shaping" else value[0], jax.tree.map(whole, grads))
        for name, (value, grads) in out.items()
    }


TRANSFORMS = {"vmap of checkpoint": jax.jit(vmapped), "shard_map": jax.jit(sharded), "pmap": pmapped}


RUN = jax.jit(plain)


@pytest.fixture(scope="module")
def expected():
    return {family: jax.device_get(RUN(of_family(family))) for family in FAMILIES}


def everywhere(family, expected):
    """name -> value and gradients, as one vector. Policy losses also at small rewards, and at advantages that differ
    within a row with one token of it 25 nats off."""
    results = [expected[family]]
    if family == "policy_loss":
        advantages = jnp.asarray(np.random.default_rng(1).normal(0, 3, (8, 9)), jnp.float32)
        far = jnp.zeros((8, 9)).at[:, 1].set(jnp.where(jnp.arange(8) % 2 > 0, -25.0, 25.0))

        def moved(case):
            logp = {"logp": case.moving["logp"] + far}
            return case._replace(
                moving={**case.moving, **logp}, rows={**case.rows, "advantages": jnp.where(case.rows["mask"], advantages, 0)}
            )

        results.append(RUN({name: moved(case) for name, case in of_family(family).items()}))
        results.append(RUN(of_family(family, reward_scale=1e-3)))
    flat = lambda name: [np.ravel(x) for result in results for x in jax.tree.leaves(result[name])]  # noqa: E731
    return {name: np.concatenate(flat(name)) for name in expected[family]}


TRANSFORMS = {"vmap of checkpoint": jax.jit(vmapped), "shard_map": jax.jit(sharded), "pmap": pmapped}


def test_what_is_said_of_every_row(capsys):
    assert main(["list", "objectives", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == list(ROWS) and len(records) >= 90
    for record in records:
        assert record["family"] in FAMILIES and record["formula"] and "{" not in record["formula"], record["name"]
        assert record["additive"] in (True, False) and record["alias_of"] in (None, *ROWS)
        assert all(paper["title"] and paper["link"].startswith("https://") for paper in record["papers"])
        assert record["papers"] or record["name"] in UNPUBLISHED, record["name"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_rows_are_one_function(expected, family):
    """In value or gradient, on the probe batch; aliases are what they say."""
    seen, vectors = {}, everywhere(family, expected)
    for name in sorted(vectors, key=lambda name: bool(ROWS[name].alias_of)):
        x = vectors[name]
        same = [other for other, y in seen.items() if x.shape == y.shape and np.allclose(x, y, rtol=1e-6, atol=1e-7)]
        root = ROWS[name].alias_of
        assert (root in same) if root else not same, f"{name}: {same}"
        if not root:
            seen[name] = x


@pytest.mark.parametrize("how", ["vmap of checkpoint", "shard_map", pytest.param("pmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_value_and_one_gradient(expected, family, how):
    got = jax.device_get(TRANSFORMS[how](additive(family)))
    assert set(got) == set(additive(family)) and got
    for name, (value, grads) in got.items():
        right, right_grads = expected[family][name]
        np.testing.assert_allclose(value, right, rtol=2e-5, atol=1e-6, err_msg=name)
        for argument, gradient in right_grads.items():
            np.testing.assert_allclose(grads[argument], gradient, rtol=2e-5, atol=1e-6, err_msg=f"{name} {argument}")
