"""Chain: compose d known maps, one at a time in the open or all at once in the head.

A prompt `x0 f1 f2 .. fd SEP` asks for x_d, where x_i = f_i(x_{i-1}); d is the level. Two groups:

    affine  x in Z_p and f: x -> a x + b (mod p), a != 0. The maps form AGL(1, p), of order p (p - 1).
    s5      x in S_5 and f: x -> f x (left multiplication): the word problem of S_5 with a start
            element, complete for NC1 (Barrington 1989, Theorem 5; for transformers see Merrill,
            Petty and Sabharwal 2024, arXiv 2404.08819). Values are the 120 permutations, one token each.

Every map is a bijection and x0 is uniform, so every x_i is uniform and guessing earns 1 / (number of values).
A response is `NT y EOS` (direct) or `TH x1 STEP x2 STEP .. xd ANS y EOS` (thinking). A thinking response
may have any number of steps from one on; its answer y is what counts.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.types import Array, Key

PAD, EOS, SEP, TH, NT, ANS, STEP = range(7)
VALUE = 7  # the first value token; behind the values stand the maps

# The parser's phases: what it expects next, or how it ended.
START, THOUGHT, LINK, ANSWER, CLOSE, LOST, WELL, ILL = range(8)
OTHER = 8  # class of every token that is neither punctuation nor a value
GRAMMAR = {
    (START, TH): THOUGHT,
    (START, NT): ANSWER,
    (THOUGHT, VALUE): LINK,
    (LINK, STEP): THOUGHT,
    (LINK, ANS): ANSWER,
    (ANSWER, VALUE): CLOSE,
    (CLOSE, EOS): WELL,
}
SLACK = 2  # response tokens beyond the longest demonstration
RECORD = 10  # tokens of one record of the corpus
FORCED = {"none": POLICY, "think": TH, "direct": NT}


class Task(NamedTuple):
    start: Array  # [] x0
    maps: Array  # [max_level] f1, f2, ..; those behind `level` are not asked
    values: Array  # [max_level] x1, x2, ..
    level: Array  # [] d
    told: Array  # [] bool, the prompt begins with the answer
    slip: Array  # [] the environment writes the last step as x_d + slip, modulo the number of values; 0: it does not


class State(NamedTuple):
    phase: Array  # [] int32
    step: Array  # [] int32, step values written
    last: Array  # [] int32, the last value written (x0 before any)
    count: Array  # [] int32, tokens read


class Maps(NamedTuple):
    table: np.ndarray  # [maps, values] int32: table[f, x] = f(x)
    map_names: tuple[str, ...]
    value_names: tuple[str, ...]


def affine_maps(p: int, count: int, seed: int) -> Maps:
    """x -> g x (g the least primitive root) and x -> x + 1, which generate AGL(1, p), then random others.

    Raises:
      ValueError: p is not a prime from 5 to 23, or `count` is outside 2..p(p-1)-1.
    """
    if p not in (5, 7, 11, 13, 17, 19, 23):
        raise ValueError(f"p is {p}, but the modulus must be a prime from 5 to 23")
    root = next(g for g in range(2, p) if len({pow(g, k, p) for k in range(p - 1)}) == p - 1)
    group = [(a, b) for a in range(1, p) for b in range(p)]
    chosen = _complete([(root, 0), (1, 1)], group, (1, 0), count, seed)
    table = np.array([[(a * x + b) % p for x in range(p)] for a, b in chosen], np.int32)
    return Maps(table, tuple(f"{a}x+{b}" for a, b in chosen), tuple(str(x) for x in range(p)))


def s5_maps(count: int, seed: int) -> Maps:
    """The transposition (0 1) and the cycle (0 1 2 3 4), which generate S_5, then random others.

    Values are numbered in lexicographic order; (f x)(i) = f(x(i)).
    """
    group = list(itertools.permutations(range(5)))
    rank = {x: i for i, x in enumerate(group)}
    chosen = _complete([(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)], group, (0, 1, 2, 3, 4), count, seed)
    table = np.array([[rank[tuple(f[i] for i in x)] for x in group] for f in chosen], np.int32)
    names = ["".join(map(str, x)) for x in group]
    return Maps(table, tuple("*" + names[rank[f]] for f in chosen), tuple(names))


def _complete(first: list, group: list, identity: tuple, count: int, seed: int) -> list:
    if not 2 <= count < len(group):
        raise ValueError(f"generators is {count}, but this group allows 2 to {len(group) - 1}")
    rest = [f for f in group if f not in first and f != identity]
    # RandomState, because its stream is frozen: the vocabulary must not change with numpy's version.
    order = np.random.RandomState(seed).permutation(len(rest))
    return first + [rest[i] for i in order[: count - 2]]


def transitions() -> np.ndarray:
    """[phase, class of token] -> phase: the grammar; anything else is lost until EOS ends it."""
    table = np.full((8, OTHER + 1), LOST, np.int32)
    table[:, EOS] = ILL
    for (phase, klass), target in GRAMMAR.items():
        table[phase, klass] = target
    return table


def chain(
    group: str = "affine", p: int = 7, max_level: int = 8, generators: int = 8, force: str = "none",
    corruption: float = 0.2, ramble: float = 0.0, hint: float = 0.0, slip: float = 0.0, seed: int = 0,
) -> Environment:  # fmt: skip
    """Compose a chain of known maps, step by step or in the head: affine maps mod p, or S_5.

    Reward and gold are 1 where the response is well-formed, ended by EOS and right, else 0. Signals:
    `step_right`, `step_wrong` (a step value equals the true x_i, or not; a step behind x_d is wrong) and
    `malformed` (this token leaves the grammar). `step_labels` says the same of a whole response.

    Styles `think` and `direct` are right from any state of the parser that is not lost. In the noisy styles
    each step value, or the direct answer, becomes another value with probability `corruption`, all others
    equally likely; the chain goes on from what was written and ANS repeats the last step, so that with n
    values a chain of d steps ends right with probability 1/n + (1 - 1/n) (1 - corruption n/(n-1))^d. A noisy
    thinker who is done repeats the last value as a further step with probability `ramble`, again and again,
    until the budget cuts it; a repetition is corrupted like any step.

    With `slip` a task may have its last step written by the environment, as a wrong value (all equally likely) that has no
    label: an answer that repeats it is wrong, and the style `think` puts it right. With `hint` a prompt may be
    `ANS y x0 f1 .. fd SEP`, y the answer; an environment with hint 1 tells it in the prompt of any task, also of one that
    another drew.

    Args:
      group: "affine" or "s5".
      p: the modulus of "affine", a prime from 5 to 23 ("s5" has none).
      max_level: the longest chain.
      generators: number of maps; the first two generate the whole group.
      force: "think" or "direct": the environment writes TH or NT itself; "none": the policy chooses.
      corruption: probability of a wrong value in the noisy styles.
      ramble: probability of a needless further step in the noisy styles.
      hint: share of tasks whose prompt begins with the answer.
      slip: share of tasks whose last step the environment writes.
      seed: picks the maps behind the first two.

    Raises:
      ValueError: an argument is outside the range above.
    """
    if group not in ("affine", "s5"):
        raise ValueError(f"group is {group!r}, but must be 'affine' or 's5'")
    if force not in FORCED:
        raise ValueError(f"force is {force!r}, but must be one of {sorted(FORCED)}")
    if max_level < 1:
        raise ValueError(f"max_level is {max_level}, but must be at least 1")
    if not 0 <= corruption <= 1:
        raise ValueError(f"corruption is {corruption}, but must be a probability")
    for name, share in (("hint", hint), ("slip", slip)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}, but must be a probability")
    if not 0 <= ramble < 1:
        raise ValueError(f"ramble is {ramble}, but must be a probability below 1")
    maps = affine_maps(p, generators, seed) if group == "affine" else s5_maps(generators, seed)
    n = len(maps.value_names)
    table = maps.table.reshape(-1)
    first_map = VALUE + n
    grammar = transitions().reshape(-1)
    spec = Spec(
        vocab=first_map + generators,
        prompt_len=max_level + 2 + 2 * (hint > 0),
        response_len=2 * max_level + 3 + SLACK,
        signals=("step_right", "step_wrong", "malformed"),
        parts=("format", "answer"),
        max_level=max_level,
        styles=("think", "direct", "think_noisy", "direct_noisy"),
        token_names=("PAD", "EOS", "SEP", "TH", "NT", "ANS", "STEP", *maps.value_names, *maps.map_names),
    )

    def apply(f: Array, x: Array) -> Array:
        return jnp.asarray(table)[f * n + x]

    def sample(key: Key, level: Array) -> Task:
        draws = jax.random.randint(key, (max_level + 1,), 0, np.array([n] + [generators] * max_level))
        start, fs = draws[0], draws[1:]

        def compose(x: Array, f: Array) -> tuple[Array, Array]:
            y = apply(f, x)
            return y, y

        told, slipped = (share > 0 and jax.random.bernoulli(jax.random.fold_in(key, i), share)
                         for i, share in enumerate((hint, slip)))
        shift = jax.random.randint(jax.random.fold_in(key, 2), (), 1, n) if slip > 0 else 0
        values = jax.lax.scan(compose, start, fs)[1]
        return Task(start, fs, values, jnp.asarray(level, jnp.int32), jnp.asarray(told), jnp.where(slipped, shift, 0))

    def prompt(task: Task) -> tuple[Array, Array]:
        at = jnp.arange(max_level)
        chain_ = jnp.where(at < task.level, task.maps + first_map, jnp.where(at == task.level, SEP, PAD))
        last = jnp.where(task.level == max_level, SEP, PAD)
        tokens, length = jnp.concatenate([task.start[None] + VALUE, chain_, last[None]]), task.level + 2
        if hint == 0:
            return tokens, length
        told = task.told | (hint == 1)
        answer = jnp.stack([ANS, task.values[task.level - 1] + VALUE])
        longer = jnp.concatenate([answer, tokens])
        return jnp.where(told, longer, jnp.pad(tokens, (0, 2))), length + 2 * told

    def init(task: Task, key: Key) -> State:
        zero = jnp.int32(0)
        return State(zero, zero, task.start, zero)

    def over(state: State) -> Array:
        return (state.phase >= WELL) | (state.count >= spec.response_len)

    def slips(task: Task, state: State) -> Array:
        return (task.slip > 0) & (state.phase == THOUGHT) & (state.step == task.level - 1)

    def pending(task: Task, state: State) -> Array:
        due = jnp.where(state.phase == START, FORCED[force], POLICY)
        wrong = (task.values[task.level - 1] + task.slip) % n + VALUE
        return jnp.where(over(state), DONE, jnp.where(slips(task, state), wrong, due))

    def is_value(token: Array) -> Array:
        return (token >= VALUE) & (token < first_map)

    def move(state: State, token: Array) -> Array:
        behind = jnp.where(is_value(token), VALUE, OTHER)
        klass = jnp.where(token < VALUE, jnp.maximum(token, PAD), behind)
        return jnp.asarray(grammar)[state.phase * (OTHER + 1) + klass]

    def feed(task: Task, state: State, token: Array) -> State:
        thought = (state.phase == THOUGHT) & is_value(token)
        written = thought | ((state.phase == ANSWER) & is_value(token))
        new = State(
            phase=move(state, token),
            step=state.step + thought,
            last=jnp.where(written, token - VALUE, state.last),
            count=state.count + 1,
        )
        frozen = over(state)
        return jax.tree.map(lambda old, fresh: jnp.where(frozen, old, fresh), state, new)

    def signals(task: Task, state: State, token: Array) -> Array:
        thought = (state.phase == THOUGHT) & is_value(token)
        true = task.values[jnp.minimum(state.step, max_level - 1)]
        right = thought & (state.step < task.level) & (token - VALUE == true)
        target = move(state, token)
        leaves = (state.phase < LOST) & ((target == LOST) | (target == ILL))
        events = jnp.stack([right, thought & ~right, leaves])
        return jnp.where(over(state), 0.0, events.astype(jnp.float32))

    def outcome(task: Task, state: State) -> Outcome:
        well = state.phase == WELL
        right = (well | (state.phase == CLOSE)) & (state.last == task.values[task.level - 1])
        reward = (well & right).astype(jnp.float32)
        return Outcome(reward, reward, jnp.stack([well, right]).astype(jnp.float32), state.phase < WELL)

    def oracle(task: Task, state: State, key: Key, style: Array) -> Array:
        hits, other = jax.random.uniform(key, (2,))
        direct, noisy = style % 2 == 1, style >= 2
        asked = state.step < task.level
        at = jnp.minimum(state.step, task.level - 1)
        repeats = (state.phase == ANSWER) & (state.step > 0)
        answer = task.values[task.level - 1]
        onward = jnp.where(asked, apply(task.maps[at], state.last), state.last)
        thought = jnp.where(noisy, onward, task.values[at])
        value = jnp.where(state.phase == THOUGHT, thought, jnp.where(noisy & repeats, state.last, answer))
        shift = 1 + (other * (n - 1)).astype(jnp.int32)  # uniform over the other values
        value = jnp.where(noisy & ~repeats & (hits < corruption), (value + shift) % n, value)
        opening = jnp.where(direct, NT, TH)
        link = jnp.where(asked | (noisy & (hits < ramble)), STEP, ANS)  # `hits` has no other use at a link
        speaks = (state.phase == THOUGHT) | (state.phase == ANSWER)
        rest = jnp.where(state.phase == START, opening, jnp.where(state.phase == LINK, link, EOS))
        return jnp.where(speaks, value + VALUE, rest)

    def step_labels(task: Task, tokens: Array) -> Array:
        def read(state: State, token: Array) -> tuple[State, Array]:
            right, wrong, _ = signals(task, state, token)
            label = jnp.where(right > 0, 1, jnp.where(wrong > 0, 0, -1))
            return feed(task, state, token), jnp.where(slips(task, state), -1, label)

        return jax.lax.scan(read, init(task, None), tokens)[1]

    def features(task: Task, state: State) -> Array:
        left = jnp.maximum(task.level - state.step, 0)
        progress = jnp.stack([state.count / spec.response_len, left / max_level])
        return jnp.concatenate([progress, jax.nn.one_hot(state.phase, 8)]).astype(jnp.float32)

    def corpus(key: Key) -> Array:
        length = spec.prompt_len + spec.response_len
        rows = length // RECORD
        ranges = np.array([n, n, n, generators, generators, 2])[:, None]
        x, y, w, f, g, kind = jax.random.randint(key, (6, rows), 0, ranges)
        word = {t: jnp.full(rows, t, jnp.int32) for t in (EOS, SEP, TH, NT, ANS, STEP)}
        x_, y_, w_, f_, g_ = x + VALUE, y + VALUE, w + VALUE, f + first_map, g + first_map
        fx, gy = apply(f, x) + VALUE, apply(g, y) + VALUE
        facts = [x_, f_, word[SEP], fx, word[EOS], y_, g_, word[SEP], gy, word[EOS]]
        forms = [word[TH], x_, word[STEP], y_, word[ANS], y_, word[EOS], word[NT], w_, word[EOS]]
        text = jnp.where(kind[:, None] == 0, jnp.stack(facts, 1), jnp.stack(forms, 1)).reshape(-1)
        return jnp.zeros(length, jnp.int32).at[: text.size].set(text)

    return Environment(
        name="chain", spec=spec, sample=sample, prompt=prompt, init=init, pending=pending, feed=feed,
        signals=signals, outcome=outcome, oracle=oracle, step_labels=step_labels, features=features,
        corpus=corpus,
    )  # fmt: skip
