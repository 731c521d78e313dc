"""The chain against plain Python: values, grammar, groups and the noise of its demonstrations."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxpt.envs import laws, make
from jaxpt.envs.chain import VALUE, affine_maps, s5_maps
from jaxpt.envs.protocol import DONE

AFFINE = make("chain", p=7, max_level=4)
S5 = make("chain", group="s5", max_level=3, generators=4)
NAMES = {name: i for i, name in enumerate(AFFINE.spec.token_names)}
ROWS = 4000
SEEDS = st.integers(0, 2**31 - 1)


def words(env, tokens):
    return [env.spec.token_names[t] for t in tokens]


def solve(names):
    """x1, x2, .. of a prompt, from the names of its tokens alone."""
    x, *fs, sep = names
    assert sep == "SEP"
    values = []
    for f in fs:
        if f.startswith("*"):
            x = "".join(f[1:][int(i)] for i in x)
        else:
            a, b = f.split("x+")
            x = str((int(a) * int(x) + int(b)) % 7)
        values.append(x)
    return values


@partial(jax.jit, static_argnums=0)
def prompts(env, key, level):
    def one(k):
        task = env.sample(k, level)
        return task, *env.prompt(task)

    return jax.vmap(one)(jax.random.split(key, 64))


@pytest.mark.parametrize("env", [AFFINE, S5], ids=["affine", "s5"])
def test_values_are_the_composition(env):
    @given(SEEDS, st.integers(1, env.spec.max_level))
    def holds(seed, level):
        tasks, tokens, n = jax.device_get(prompts(env, jax.random.key(seed), level))
        assert (n == level + 2).all()
        for row in range(len(n)):
            true = solve(words(env, tokens[row, : n[row]]))
            assert words(env, VALUE + tasks.values[row, :level]) == true

    holds()


@partial(jax.jit, static_argnums=0)
def demonstrate(env, key, level, style):
    def one(k):
        k_task, k_play = jax.random.split(k)
        task = env.sample(k_task, level)
        row = laws.play(env, task, k_play, lambda task, state, kk: env.oracle(task, state, kk, style))
        labels = env.step_labels(task, row.tokens)
        return task, row.tokens, row.signals, labels, env.outcome(task, row.final)

    return jax.vmap(one)(jax.random.split(key, ROWS))


@pytest.mark.parametrize("style", [0, 1])
@pytest.mark.parametrize("level", [1, 4])
def test_clean_demonstrations_are_written_as_documented(style, level):
    got = jax.device_get(demonstrate(AFFINE, jax.random.key(0), level, style))
    tasks, tokens, signals, labels, outcome = got
    assert (outcome.reward == 1).all() and (outcome.gold == 1).all() and (outcome.parts == 1).all()
    for row in range(50):
        xs = [str(x) for x in tasks.values[row, :level]]
        steps = " STEP ".join(xs)
        text = f"TH {steps} ANS {xs[-1]} EOS" if style == 0 else f"NT {xs[-1]} EOS"
        text = text.split()
        assert words(AFFINE, tokens[row]) == text + ["PAD"] * (AFFINE.spec.response_len - len(text))
    steps = level if style == 0 else 0
    assert ((labels == 1).sum(1) == steps).all() and (signals[..., 0].sum(1) == steps).all()
    assert not signals[..., 1:].any()


def within(count, trials, probability):
    """The count is no rarer than one in a million under the binomial law."""
    return stats.binomtest(int(count), int(trials), probability).pvalue > 1e-6


@pytest.mark.parametrize("style", [2, 3])
@pytest.mark.parametrize("level", [1, 4])
def test_noisy_demonstrations_have_the_stated_rate(style, level):
    tasks, tokens, _, labels, outcome = jax.device_get(demonstrate(AFFINE, jax.random.key(1), level, style))
    c, n = 0.2, 7
    steps = level if style == 2 else 1
    right = 1 / n + (1 - 1 / n) * (1 - c * n / (n - 1)) ** steps
    assert within(outcome.reward.sum(), ROWS, right)
    assert (outcome.parts[:, 0] == 1).all() and not outcome.truncated.any()
    if style == 3:
        shift = (tokens[:, 1] - VALUE - tasks.values[:, level - 1])[outcome.reward == 0] % n
        assert stats.chisquare(np.bincount(shift, minlength=n)[1:]).pvalue > 1e-6
    else:
        assert within((labels[:, 1] == 0).sum(), ROWS, c)
        steps = tokens[:, 1 : 2 * level : 2] - VALUE
        assert (tokens[:, 2 * level + 1] - VALUE == steps[:, -1]).all()  # ANS repeats the last step
        # The chain goes on from the value that is written.
        before = np.concatenate([tasks.start[:, None], steps[:, :-1]], 1)
        onward = affine_maps(7, 8, seed=0).table[tasks.maps[:, :level], before]
        assert within((steps != onward).sum(), steps.size, c)
        shift = (steps - onward)[steps != onward] % n
        assert stats.chisquare(np.bincount(shift, minlength=n)[1:]).pvalue > 1e-6
        assert ((labels == 0).sum(1) + (labels == 1).sum(1) == level).all()


def test_a_rambling_demonstrator_repeats_itself_until_the_budget_ends():
    """Needless steps are geometric; without corruption every answer in time is right."""
    env, level, ramble = make("chain", p=7, max_level=4, corruption=0.0, ramble=0.5), 3, 0.5
    tasks, tokens, _, labels, outcome = jax.device_get(demonstrate(env, jax.random.key(2), level, 2))
    steps = ((labels == 0) | (labels == 1)).sum(1)
    fit = (env.spec.response_len - 3) // 2 - level  # needless steps that leave room for ANS y EOS
    for extra in range(fit + 1):
        done = (steps == level + extra) & ~outcome.truncated
        assert within(done.sum(), ROWS, (1 - ramble) * ramble**extra) and (outcome.reward[done] == 1).all()
    assert within(outcome.truncated.sum(), ROWS, ramble ** (fit + 1)) and not outcome.reward[outcome.truncated].any()
    written = tokens[:, 1 : 2 * (level + fit) : 2]
    assert ((written == VALUE + tasks.values[:, [level - 1]]) | (labels[:, 1 : 2 * (level + fit) : 2] != 0)).all()


def test_a_slip_is_written_by_the_environment_and_put_right_in_the_answer():
    env, level = make("chain", p=7, max_level=4, slip=0.25), 3
    tasks, tokens, signals, labels, outcome = jax.device_get(demonstrate(env, jax.random.key(3), level, 0))
    slipped = tasks.slip > 0
    assert within(slipped.sum(), ROWS, 0.25) and (outcome.reward == 1).all()
    assert stats.chisquare(np.bincount(tasks.slip[slipped], minlength=7)[1:]).pvalue > 1e-6
    steps = tokens[:, 1 : 2 * level : 2] - VALUE
    assert (steps[:, :-1] == tasks.values[:, : level - 1]).all()
    assert (steps[:, -1] == (tasks.values[:, level - 1] + tasks.slip) % 7).all()
    assert not (labels == 0).any() and ((labels == 1).sum(1) == level - slipped).all()
    assert (signals[..., 0].sum(1) == level - slipped).all() and not signals[..., 1:].any()  # no event of the policy's
    noisy = jax.device_get(demonstrate(env, jax.random.key(3), level, 2))
    assert not noisy[4].reward[noisy[0].slip > 0].any()  # who repeats the last step repeats the slip


def test_a_hint_is_the_answer_before_the_prompt():
    plain, some, always = (make("chain", p=7, max_level=4, hint=share) for share in (0.0, 0.25, 1.0))
    level = 3
    tasks, tokens, n = jax.device_get(prompts(plain, jax.random.key(4), level))
    told = jnp.arange(64) % 2 == 0
    lengths = {}
    for env, expected in ((some, np.asarray(told)), (always, np.ones(64, bool))):
        longer, length = jax.device_get(jax.vmap(env.prompt)(tasks._replace(told=told)))
        lengths[env.spec.prompt_len] = longer.shape[1]
        assert (length == n + 2 * expected).all()
        for row, tells in enumerate(expected):
            answer = [NAMES["ANS"], VALUE + tasks.values[row, level - 1]] if tells else []
            assert longer[row, : length[row]].tolist() == answer + tokens[row, : n[row]].tolist()
            assert not longer[row, length[row] :].any()
    assert lengths == {8: 8} and not tasks.told.any()
    drawn = jax.vmap(lambda key: some.sample(key, level))(jax.random.split(jax.random.key(5), ROWS))
    assert within(drawn.told.sum(), ROWS, 0.25)


@pytest.mark.parametrize("env, n", [(AFFINE, 7), (S5, 120)], ids=["affine", "s5"])
def test_answers_are_uniform(env, n):
    last = env.spec.max_level - 1
    tasks = [prompts(env, jax.random.key(seed), last + 1)[0] for seed in range(60)]
    counts = np.bincount(np.concatenate([t.values[:, last] for t in tasks]), minlength=n)
    assert stats.chisquare(counts).pvalue > 1e-6


def closure(table):
    """The permutations of the values that the maps generate."""
    found, frontier = set(), {tuple(range(table.shape[1]))}
    while frontier:
        found |= frontier
        frontier = {tuple(row[list(x)]) for x in frontier for row in table} - found
    return found


@pytest.mark.parametrize("p", [5, 7, 23])
def test_affine_maps_generate_the_whole_group(p):
    maps = affine_maps(p, 8, seed=3)
    assert len(closure(maps.table[:2])) == len(closure(maps.table)) == p * (p - 1)
    assert (np.sort(maps.table, 1) == np.arange(p)).all() and len(np.unique(maps.table, axis=0)) == 8
    f, g = maps.table[:2]
    assert (f[g] != g[f]).any()


def test_s5_maps_are_left_multiplication_in_s5():
    table = s5_maps(119, seed=0).table  # all of S_5 but the identity
    assert len(closure(table[:2])) == 120
    assert (np.sort(table, 1) == np.arange(120)).all()
    group = list(itertools.permutations(range(5)))
    named = {table[f, 0]: table[f] for f in range(119)} | {0: np.arange(120)}  # f(identity) is f
    product = np.stack([named[i] for i in range(120)])  # [f, x] -> f x
    assert (product[product, :] == product[:, product]).all()  # (f g) x = f (g x)
    for f, x in [(3, 77), (119, 5), (64, 64)]:
        assert group[product[f, x]] == tuple(group[f][i] for i in group[x])


@partial(jax.jit, static_argnums=0)
def judge(env, task, response):
    def read(state, token):
        return env.feed(task, state, token), (env.pending(task, state), env.signals(task, state, token))

    state, (asked, signals) = jax.lax.scan(read, env.init(task, jax.random.key(0)), response)
    return env.outcome(task, state), jnp.append(asked, env.pending(task, state)), signals


def respond(text, task):
    """Judges a response in which xi stands for the true x_i and w for a wrong answer."""
    values = {f"x{i + 1}": str(int(x)) for i, x in enumerate(task.values)}
    values["w"] = str((int(task.values[task.level - 1]) + 1) % 7)
    tokens = [NAMES[values.get(word, word)] for word in text.split()]
    assert len(tokens) <= AFFINE.spec.response_len
    padding = [0] * (AFFINE.spec.response_len - len(tokens))
    return jax.device_get(judge(AFFINE, task, jnp.array(tokens + padding)))


TASK = AFFINE.sample(jax.random.key(5), 3)


@pytest.mark.parametrize("text", [
    "NT x3 EOS", "TH x1 STEP x2 STEP x3 ANS x3 EOS", "TH x1 ANS x3 EOS", "TH w STEP w ANS x3 EOS",
    "TH x1 STEP x2 STEP x3 STEP w ANS x3 EOS", "NT x3 EOS w NT",
])  # fmt: skip
def test_well_formed_and_right_earns_one(text):
    outcome, *_ = respond(text, TASK)
    assert (outcome.reward, outcome.gold, outcome.truncated) == (1, 1, False)
    assert outcome.parts.tolist() == [1, 1]


@pytest.mark.parametrize("text, form, answer, truncated", [
    ("NT w EOS", 1, 0, False),
    ("TH x1 STEP x2 STEP x3 ANS w EOS", 1, 0, False),
    ("EOS", 0, 0, False),
    ("NT EOS", 0, 0, False),
    ("TH EOS", 0, 0, False),
    ("x3 EOS", 0, 0, False),
    ("TH ANS x3 EOS", 0, 0, False),
    ("NT x3 x3 EOS", 0, 0, False),
    ("NT NT x3 EOS", 0, 0, False),
    ("NT 1x+1 EOS", 0, 0, False),
    ("TH NT x3 EOS", 0, 0, False),
    ("TH x1 x2 ANS x3 EOS", 0, 0, False),
    ("TH x1 STEP STEP x3 ANS x3 EOS", 0, 0, False),
    ("TH x1 STEP ANS x3 EOS", 0, 0, False),
    ("TH x1 STEP x2 STEP x3 EOS", 0, 0, False),
    ("TH x1 STEP x2 STEP x3 ANS EOS", 0, 0, False),
    ("TH x1 STEP x2 STEP x3 ANS x3 STEP EOS", 0, 0, False),
    ("SEP NT x3 EOS", 0, 0, False),
    ("PAD NT x3 EOS", 0, 0, False),
    ("NT PAD x3 EOS", 0, 0, False),
    ("NT x3 SEP SEP SEP SEP SEP SEP SEP SEP SEP SEP SEP", 0, 0, True),
    ("TH x1 STEP x2 STEP x3 STEP x3 STEP x3 ANS x3 x3", 0, 0, True),
    ("TH x1 STEP x2 STEP x3 STEP x3 STEP x3 ANS x3 EOS", 1, 1, False),
    ("TH w STEP w STEP w STEP w STEP w STEP ANS", 0, 0, True),
    ("TH w STEP w STEP w STEP w STEP w STEP w", 0, 0, True),
])  # fmt: skip
def test_malformed_wrong_or_late(text, form, answer, truncated):
    outcome, asked, signals = respond(text, TASK)
    assert outcome.reward == outcome.gold == form * answer
    assert outcome.parts.tolist() == [form, answer] and outcome.truncated == truncated
    assert asked[-1] == DONE
    if not truncated:
        assert signals[:, 2].sum() == 1 - form  # the grammar is left once, or never


def test_an_answer_without_its_end_is_right_but_unpaid():
    state = AFFINE.init(TASK, jax.random.key(0))
    for word in ["NT", str(int(TASK.values[2]))]:
        state = AFFINE.feed(TASK, state, jnp.int32(NAMES[word]))
    outcome = AFFINE.outcome(TASK, state)
    assert outcome.parts.tolist() == [0, 1] and outcome.reward == 0 and outcome.truncated


def test_signals_and_labels_compare_with_the_true_values():
    text = "TH x1 STEP w STEP x3 STEP x3 ANS x3 EOS"
    task = TASK._replace(values=jnp.array([1, 2, 3, 3]))  # w is 4
    _, _, signals = respond(text, task)
    expected = [-1, 1, -1, 0, -1, 1, -1, 0, -1, -1, -1, -1, -1]  # the fourth step stands behind x_3
    label = np.where(signals[:, 0] == 1, 1, np.where(signals[:, 1] == 1, 0, -1))
    assert label.tolist() == expected
    tokens = [3, 8, 6, 11, 6, 10, 6, 10, 5, 10, 1, 0, 0]
    assert AFFINE.step_labels(task, jnp.array(tokens)).tolist() == expected


def test_the_corpus_tells_the_truth():
    """Every fact `x f SEP y` is right, and ANS repeats the last step."""
    facts = 0
    docs = jax.device_get(jax.jit(jax.vmap(AFFINE.corpus))(jax.random.split(jax.random.key(0), 200)))
    for doc in docs:
        names = words(AFFINE, doc[doc > 0])
        for i, name in enumerate(names):
            if name == "SEP":
                assert solve(names[i - 2 : i + 1]) == [names[i + 1]]
                facts += 1
            if name == "ANS":
                assert names[i - 1] == names[i + 1]
    assert facts > 100
