"""Faults that were reported of other libraries, as tests of ours: groups, returns, whitening. The wrong number of each
stands in the comment, with the report."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives import ROWS
from jaxpt.objectives import advantages as adv
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.value import gae, whiten
from jaxpt.train.estimators import EstimatorConfig
from jaxpt.train.tabular import TabularConfig
from jaxpt.types import bare_trajectory

V, TOOL = jnp.asarray([[0.1, 9.0, 0.3, 0.2]]), jnp.asarray([[1, 0, 1, 1]])  # a tool's token, of value 9, in the middle


def batch(mask, reward, group=None, **fields):
    mask = jnp.asarray(mask, bool)
    group = jnp.zeros(len(reward), jnp.int32) if group is None else jnp.asarray(group)
    traj = bare_trajectory(jnp.zeros(mask.shape, jnp.int32), mask, reward=jnp.asarray(reward), group=group)
    return traj._replace(**fields)


def prepared(name, *args, **fields):
    return np.asarray(jax.jit(ROWS[name].prepare)(batch(*args, **fields))["advantages"])


@partial(jax.jit, static_argnums=0)
def lost(name, traj, logp):
    """The row's loss where logp is the sampler's too, and its advantages."""
    ready = ROWS[name].prepare(traj)
    value, _ = ROWS[name].loss(logp, logp, ready["advantages"], ready["mask"], totals=ready["totals"])
    return value, ready["advantages"]


def group_of(f, rewards):
    return np.asarray(jax.jit(f)(jnp.asarray(rewards), jnp.zeros(len(rewards), jnp.int32)))


def test_all_tokens_masked():
    """TRL #5826, #3700: 0 / 0."""
    nothing, x = jnp.zeros((2, 3), bool), jnp.full((2, 3), jnp.nan)
    assert (jax.jit(whiten)(x, nothing) == 0).all()
    loss, advantages = lost("grpo_no_kl", batch(nothing, [1.0, 0.0]), x)
    assert loss == 0 and (advantages == 0).all()


def test_whitening_leaves_padding_out():
    """SkyRL #1305, #1782: mean over padded slots too; 0 in place of -1."""
    np.testing.assert_allclose(whiten(jnp.asarray([[1.0, 3.0, 0.0, 0.0]]), jnp.asarray([[1, 1, 0, 0]]))[0], [-1, 1, 0, 0])


def test_a_row_without_a_trainable_token_moves_no_baseline():
    """OpenRLHF #1239, verl #6362: -49.5 in place of 0."""
    np.testing.assert_array_equal(prepared("dr_grpo", [[0, 0], [1, 1]], [100.0, 1.0]), 0)


def test_an_end_token_that_is_the_padding_token_is_trained():
    """TRL #4970: a mask by token id drops it; mean NLL of 1, 1, 3 is 1 in place of 5/3."""
    traj = batch([[1, 1, 1]], [1.0])  # all tokens are 0, the padding
    np.testing.assert_allclose(lost("raft", traj, jnp.asarray([[-1.0, -1.0, -3.0]]))[0], 5 / 3, rtol=1e-6)


def test_a_tool_s_token_is_no_step_of_gae():
    """verl #2337: 1.5722 with the tool as a transition; OpenRLHF 0.11.2: 0.6722 with its value zeroed but a step decayed."""
    got = gae(jnp.asarray([[0.0, 0, 0, 1]]), V, TOOL, 1.0, 0.9)
    np.testing.assert_allclose(got[0, 0], 0.758, rtol=1e-5)


def test_a_return_goes_on_behind_a_tool_s_token():
    """verl #7278, #6376: 0 in place of 0.5."""
    got = gae(jnp.asarray([[0.0, 0, 1]]), jnp.zeros((1, 3)), jnp.asarray([[1, 0, 1]]), 0.5, 1.0)
    np.testing.assert_allclose(got[0], [0.5, 0, 1])


def test_the_terminal_reward_is_on_the_last_action():
    """TRL #3750, #5338: on the first padded slot, where the mask loses it; 0 in place of 1."""
    for name, discount in (("reinforce", 1), ("a2c", 0.99)):
        np.testing.assert_allclose(prepared(name, [[0, 1, 1, 0, 0]], [1.0])[0], [0, discount, 1, 0, 0])


@pytest.mark.parametrize("name", ["reinforce", "rloo", "dr_grpo"])
def test_rewards_are_no_token_ids(name):
    """Tunix's PPO adds rewards to a buffer of ints: 0.7 becomes 0."""
    got = prepared(name, [[1], [1]], [0.7, 0.0])
    np.testing.assert_allclose(got[0], {"reinforce": 0.7, "rloo": 0.7, "dr_grpo": 0.35}[name], rtol=1e-6)


def test_a_group_of_one():
    """axolotl #3353, Tunix: NaN. verl #7793, #7794: 0.7 by one code path and 0 by another."""
    for f in (adv.standardised, adv.centred, adv.leave_one_out, adv.over_mean):
        assert group_of(f, [0.7]) == 0


def test_standard_deviation_is_the_group_s():
    """NeMo-RL #1518: that of the others, 0 here, gives 1e6 in place of 1.5."""
    np.testing.assert_allclose(group_of(adv.standardised, [1.0, 0, 0, 0])[0], 1.5, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.95, 0.3])
def test_seven_equal_rewards(reward):
    """NeMo-RL #4158: a variance by E x^2 - (E x)^2 is 2e-7 at 0.95. OpenRLHF's group_norm: 0.898 at 0.3, as the mean is
    off by one ulp and eps is 1e-9; verl, Tunix, SkyRL, TRL less of the same."""
    np.testing.assert_array_equal(group_of(adv.standardised, [reward] * 7), 0)


def test_a_mean_of_zero_is_no_denominator():
    """SkyRL's maxrl: 1e6 in place of 0; a negative mean would turn all signs."""
    np.testing.assert_array_equal(group_of(adv.over_mean, [1.0, -1.0]), 0)
    np.testing.assert_array_equal(group_of(adv.over_mean, [-3.0, 0.0]), 0)


def test_every_turn_has_its_own_advantage():
    """SkyRL #1492, #1507: the last step's mask gives earlier steps 0 in place of 1."""
    turns = jnp.asarray([[0, 0, 1, 1]])
    np.testing.assert_allclose(prepared("reinforce", [[1, 1, 1, 1]], [1.0], turn=turns)[0], 1)
    two = prepared("grpo_process", [[1, 1, 1, 1]] * 2, [1.0, 0.0], turn=jnp.repeat(turns, 2, axis=0))
    assert (two[0] > 0).all() and (two[1] < 0).all()


def test_going_on_is_not_punished_for_what_was_earned_before():
    """verl #7244: a baseline by the turn at which a row stops gives -E[R] = -0.4 to going on. Here both rows earn 0.4 in
    the first turn; one stops there, the other goes on for nothing."""
    row = compose("", "", advantage="leave_one_out", credit="turn", ratio="none", surrogate="score", reduction="token_mean")
    traj = batch([[1, 0], [1, 1]], [0.0, 0.0], turn=jnp.asarray([[0, 0], [0, 1]]))
    ready = jax.jit(row.prepare)(traj, process=jnp.asarray([[0.4, 0.0], [0.4, 0.0]]))
    np.testing.assert_array_equal(ready["advantages"], 0)


def test_a_row_says_what_it_needs():
    """In place of an error from inside an operation on None."""
    traj = batch([[1, 1]] * 2, [1.0, 0.0])
    for name, what in (("remax", "baseline"), ("gigpo", "anchor"), ("gdpo", "parts")):
        with pytest.raises(TypeError, match=f"row '{name}' needs {what}"):
            ROWS[name].prepare(traj, ref_logp=jnp.zeros((2, 2)))
    for name, what in (("remax", "baseline"), ("gigpo", "anchor"), ("gdpo", "parts")):
        for config in (TabularConfig, EstimatorConfig):
            with pytest.raises(ValueError, match=f"'{name}' needs {what}, which this program does not compute"):
                config(objectives=(name,))
