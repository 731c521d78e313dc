"""Cards against plain Python: formulas as fractions, verdicts, populations, demonstrations, feedback."""

import itertools
from collections import Counter
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxpt.envs import formulas, glyphs, laws, make
from jaxpt.envs.cards import COUNT, FACES, LEVELS, SYNTAX, TEN
from jaxpt.envs.protocol import DONE, POLICY

CARDS = make("cards")
TWICE = make("cards", k=2, tries=2)
DRAWN = make("cards", k=2, tries=2, pictures=True)
ID = {name: i for i, name in enumerate(TWICE.spec.token_names)} | {name: i for i, name in enumerate(CARDS.spec.token_names)}
FOUND = formulas.table(3, 6, 30)
LEVEL = {name: i for i, name in enumerate(LEVELS[: CARDS.spec.max_level], start=1)}
SEEDS = st.integers(0, 2**31 - 1)


def words(env, tokens):
    return [env.spec.token_names[t] for t in np.asarray(tokens).tolist()]


def value(formula):
    """The fraction that a formula of words is, None without a value, ValueError where it is no formula."""
    stack = []
    for word in formula:
        if word.isdigit():
            stack.append(Fraction(word))
            continue
        if len(stack) < 2 or word not in ("+", "-", "*", "/"):
            raise ValueError(word)
        b, a = stack.pop(), stack.pop()
        if a is None or b is None or (word == "/" and b == 0):
            stack.append(None)
        else:
            stack.append({"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[word]())
    if len(stack) != 1:
        raise ValueError(formula)
    return stack[0]


def verdict(response, numbers, target):
    """What the first attempt of a response of words deserves."""
    k = len(numbers)
    if "EOS" not in response:
        return "SYNTAX"
    attempt = response[: response.index("EOS")]
    try:
        got, formula = [int(word) for word in attempt[:k]], attempt[k + 1 :]
        if len(got) < k or attempt[k : k + 1] != ["SEP"] or len(formula) > 2 * k - 1:
            return "SYNTAX"
        result = value(formula)
    except ValueError:
        return "SYNTAX"
    if got != numbers or Counter(int(word) for word in formula if word.isdigit()) != Counter(numbers):
        return "NUMBERS"
    return "RIGHT" if result == target else "VALUE"


def reachable(numbers):
    """All values of numbers that are combined two by two: another way to list formulas."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [x for at, x in enumerate(numbers) if at not in (i, j)]
        a, b = numbers[i], numbers[j]
        for x in {a + b, a - b, a * b} | ({a / b} if b else set()):
            found |= reachable([*rest, x])
    return found


@pytest.mark.parametrize("k, count", [(2, 8), (3, 192)])
def test_every_formula_is_listed_once(k, count):
    codes = formulas.formulas(k)
    assert len(codes) == len({tuple(code) for code in codes.tolist()}) == count
    assert (np.sort(np.where(codes < k, codes, k), 1)[:, :k] == np.arange(k)).all()


@given(st.integers(0, 454))
def test_a_hand_has_a_solution_where_one_can_be_reached(row):
    values = reachable([Fraction(int(x)) for x in FOUND.hands[row]])
    assert FOUND.solvable[row].tolist() == [target in values for target in range(6, 31)]


def test_the_hand_that_needs_a_fraction():
    """8 / (3 - 8 / 3) = 24 and nothing else makes it of 3 3 8 8."""
    found = formulas.table(4, 24, 24)
    (row,) = np.nonzero((found.hands == [3, 3, 8, 8]).all(1))[0]
    solving = found.codes[np.unpackbits(found.solves[row, 0])[: len(found.codes)] > 0]
    spelled = {" ".join([*"3388", *"+-*/"][c] for c in code) for code in solving.tolist()}
    assert spelled == {"8 3 8 3 / - /"}
    assert found.solvable.sum() == 1362  # of 1820


@partial(jax.jit, static_argnums=0)
def judge(env, task, tokens):
    """The outcome of a response that is fed as it stands, and what the environment asks and signals at every token."""

    def read(state, token):
        return env.feed(task, state, token), (env.pending(task, state), env.signals(task, state, token))

    final, (asked, signals) = jax.lax.scan(read, env.init(task, None), tokens)
    return env.outcome(task, final), final.verdict, asked, signals


@partial(jax.jit, static_argnums=0)
def tasks_of(env, key, level):
    def one(k):
        task = env.sample(k, level)
        return task, env.prompt(task)[0]

    return jax.vmap(one)(jax.random.split(key, 512))


@partial(jax.jit, static_argnums=0)
def demonstrate(env, key, level, style):
    def one(k):
        task = env.sample(k, level)
        row = laws.play(env, task, k, lambda task, state, kk: env.oracle(task, state, kk, style))
        return task, row.tokens, row.mask, env.step_labels(task, row.tokens)

    return jax.vmap(one)(jax.random.split(key, 512))


WORDS = st.sampled_from(["EOS", "SEP", "+", "-", "*", "/", "1", "7", "10", "30", "cJ", "PAD"])
CORRUPTED = st.lists(st.tuples(st.integers(0, 9), WORDS), max_size=2)


@given(SEEDS, st.sampled_from(list(LEVEL.values())), CORRUPTED)
def test_verdicts_are_those_of_fractions(seed, level, changes):
    task = CARDS.sample(jax.random.key(seed), level)
    tokens, right = solutions(task)
    formula = words(CARDS, tokens[seed % len(tokens) if changes == [] else right[seed % len(right)]])
    response = [*map(str, task.numbers.tolist()), "SEP", *formula, "EOS"]
    for at, word in changes:
        response[at] = word
    padded = response + ["PAD"] * (CARDS.spec.response_len - len(response))
    outcome, got, asked, _ = jax.device_get(judge(CARDS, task, jnp.array([ID[word] for word in padded])))
    expected = verdict(response, task.numbers.tolist(), int(task.target))
    cut = "EOS" not in response
    assert outcome.reward == outcome.gold == (expected == "RIGHT") and outcome.truncated == cut
    assert cut or got == ["SYNTAX", "NUMBERS", "VALUE", "RIGHT"].index(expected) + SYNTAX
    assert outcome.parts.tolist() == [expected != "SYNTAX", expected in ("VALUE", "RIGHT")]
    ends = len(padded) if cut else response.index("EOS") + 1
    assert (asked[:ends] == POLICY).all() and (asked[ends:] == DONE).all()


def solutions(task):
    """Tokens of every formula of a task's hand, and the indices of those that solve it, from the table alone."""
    numbers = FOUND.hands[int(task.hand)]
    names = [*map(str, numbers.tolist()), "+", "-", "*", "/"]
    tokens = np.array([[ID[names[c]] for c in code] for code in FOUND.codes.tolist()])
    return tokens, np.nonzero(np.unpackbits(FOUND.solves[int(task.hand), int(task.target) - 6])[:192])[0]


def test_division_by_zero_has_no_value_and_keeps_none():
    task = CARDS.sample(jax.random.key(0), 1)._replace(numbers=jnp.array([6, 3, 3]), target=jnp.int32(6))
    for formula in ("6 3 3 - /", "6 6 3 3 - / /", "3 3 - 6 /", "6 3 3 / /"):
        response = ["6", "3", "3", "SEP", *formula.split(), "EOS"]
        padded = response + ["PAD"] * (CARDS.spec.response_len - len(response))
        outcome, *_ = judge(CARDS, task, jnp.array([ID[word] for word in padded]))
        assert outcome.reward == (verdict(response, [6, 3, 3], 6) == "RIGHT") == (formula == "6 3 3 / /")


@pytest.mark.parametrize("level", LEVEL)
def test_a_level_is_the_population_it_says(level):
    tasks, prompts = jax.device_get(tasks_of(CARDS, jax.random.key(1), LEVEL[level]))
    rules = {"shift": {COUNT}, "diverse": set(range(len(FACES))) - {COUNT}}.get(level, {TEN})
    assert set(tasks.rule.tolist()) == rules
    plain = np.minimum(np.arange(14), 10)
    held = jax.device_get(tasks_of(CARDS, jax.random.key(2), LEVEL["held"]))[0].numbers
    hidden = {tuple(sorted(hand)) for hand in held.tolist()}
    for row in range(len(prompts)):
        rule, *dealt, tgt, target, sep = words(CARDS, prompts[row])
        ranks = [("A 2 3 4 5 6 7 8 9 10 J Q K".split().index(card[1:]) + 1) for card in dealt]
        assert (tgt, sep, target) == ("TGT", "SEP", str(tasks.target[row]))
        counts = {"TEN": plain, "COUNT": np.arange(14)}.get(rule)
        if counts is None:  # the name of a rule is who counts 11, who 12, who 13
            counts = np.concatenate([np.arange(11), [11 + rule.index(face) for face in "JQK"]])
        assert tasks.numbers[row].tolist() == [counts[rank] for rank in ranks]
        assert (tuple(sorted(tasks.numbers[row])) in hidden) == (level == "held")
        assert FOUND.solvable[tasks.hand[row], tasks.target[row] - 6]
        assert FOUND.hands[tasks.hand[row]].tolist() == sorted(tasks.numbers[row])
        assert level not in ("faces", "shift") or max(ranks) > 10
    if level == "diverse":
        assert stats.chisquare(np.bincount(tasks.rule, minlength=7)[[0, 2, 3, 4, 5, 6]]).pvalue > 1e-6


@given(SEEDS, st.permutations(range(3)), st.integers(2, len(FACES) - 1))
def test_the_order_and_the_names_of_cards_do_not_matter(seed, order, rule):
    """A hand in another order has the same solutions, and the canonical one; faces under a permuted rule count what
    others count under COUNT, and nothing but the prompt's names changes."""
    task = CARDS.sample(jax.random.key(seed), LEVEL["shift"])
    moved = task._replace(numbers=task.numbers[jnp.array(order)], cards=task.cards[jnp.array(order)])
    stands = {n: 11 + i for i, n in enumerate(FACES[rule])}
    renamed = task._replace(rule=jnp.int32(rule), cards=jnp.array([stands.get(int(n), int(n)) for n in task.numbers]))
    row, again, other = (played(each) for each in (task, moved, renamed))
    assert row[4:] == again[4:] and [row[i] for i in order] == again[:3] and row == other
    assert verdict(row, task.numbers.tolist(), int(task.target)) == "RIGHT"


@jax.jit
def _canonical(task):
    return laws.play(CARDS, task, jax.random.key(0), lambda task, state, key: CARDS.oracle(task, state, key, 0)).tokens


def played(task):
    return words(CARDS, _canonical(task))


def test_one_style_shows_one_solution_the_other_all_of_them_alike():
    _, tokens, mask, labels = jax.device_get(demonstrate(CARDS, jax.random.key(3), 1, 1))
    assert (mask.sum(1) == 10).all() and (labels[:, :3] == 1).all() and (labels[:, 3:] == -1).all()
    task = CARDS.sample(jax.random.key(5), 1)
    tokens, right = solutions(task)
    fixed = CARDS._replace(sample=lambda key, level: task)
    drawn = jax.device_get(demonstrate(fixed, jax.random.key(4), 1, 1))[1]
    wanted = Counter(tuple(tokens[i].tolist()) for i in right)  # a hand with equal numbers spells a solution twice
    shown = Counter(tuple(row[4:9].tolist()) for row in drawn)
    assert set(shown) <= set(wanted)
    share = np.array(list(wanted.values())) / len(right)
    assert stats.chisquare([shown[each] for each in wanted], 512 * share).pvalue > 1e-6
    shown = {tuple(row[4:9].tolist()) for row in jax.device_get(demonstrate(fixed, jax.random.key(4), 1, 0))[1]}
    assert shown == {tuple(tokens[right[0]].tolist())}


def test_a_face_read_by_the_old_rule_is_told_apart():
    task = CARDS.sample(jax.random.key(0), LEVEL["shift"])
    task = task._replace(cards=jnp.array([11, 3, 10]), numbers=jnp.array([11, 3, 10]))
    for read, events in (("11 3 10", [3, 0, 0]), ("10 3 10", [2, 1, 1]), ("12 10 10", [1, 2, 0])):
        response = [*read.split(), "SEP", "EOS"] + ["PAD"] * (CARDS.spec.response_len - 5)
        *_, signals = jax.device_get(judge(CARDS, task, jnp.array([ID[word] for word in response])))
        assert signals.sum(0).tolist() == [*events, 1]  # the formula is missing, said once


def test_a_failed_attempt_is_told_why_and_may_be_repeated():
    """Verdicts are forced tokens: they carry no mask, and the second attempt counts like the first."""
    task = TWICE.sample(jax.random.key(0), 1)._replace(cards=jnp.array([11, 3]), numbers=jnp.array([10, 3]), target=jnp.int32(30))
    right = "10 3 SEP 10 3 * EOS".split()
    names = TWICE.spec.token_names
    for wrong, told in (("10 3 SEP 10 3 + EOS", "VALUE"), ("10 2 SEP 10 3 * EOS", "NUMBERS"), ("10 3 SEP 10 10 * EOS", "NUMBERS"),
                        ("10 EOS", "SYNTAX"), ("10 3 SEP 10 3 * 3 +", "SYNTAX")):
        first = wrong.split()
        response = [*first, told, *right]
        padded = response + ["PAD"] * (TWICE.spec.response_len - len(response))
        outcome, _, asked, _ = jax.device_get(judge(TWICE, task, jnp.array([names.index(word) for word in padded])))
        expected = [POLICY] * len(first) + [names.index(told)] + [POLICY] * len(right)
        assert asked.tolist() == expected + [DONE] * (len(padded) - len(response))
        assert outcome.reward == 1 and not outcome.truncated and outcome.parts.tolist() == [1, 1, 0]
        once = jax.device_get(judge(TWICE, task._replace(tries=jnp.int32(1)), jnp.array([names.index(word) for word in padded])))
        assert once[2].tolist() == [POLICY] * len(first) + [DONE] * (len(padded) - len(first)) and once[0].reward == 0
        padded = ([*first, told, *first] + ["PAD"] * 20)[: TWICE.spec.response_len]
        assert judge(TWICE, task, jnp.array([names.index(word) for word in padded]))[0].reward == 0
    padded = jnp.array([names.index(word) for word in (right + ["PAD"] * 20)[: TWICE.spec.response_len]])
    assert judge(TWICE, task, padded)[0].parts.tolist() == [1, 1, 1]


def test_attempts_are_worth_what_a_chain_of_them_says():
    """An exact twin of retries: a table says, anew after every verdict, which of four whole attempts comes next. Its
    expected outcome, over all episodes as the environment judges them, is that of a chain of attempts; and of one that does
    not listen to verdicts the gradient is that of a single try times n (1 - p)^(n - 1), so that hard hands weigh more."""
    env, n = make("cards", k=2, tries=3), 3
    names, length = env.spec.token_names, env.spec.response_len
    task = env.sample(jax.random.key(0), 1)._replace(cards=jnp.array([11, 3]), numbers=jnp.array([10, 3]), target=jnp.int32(30))
    attempts = ["10 3 SEP 10 3 * EOS", "10 EOS", "10 2 SEP 10 2 * EOS", "10 3 SEP 10 3 + EOS"]
    told = [None, "SYNTAX", "NUMBERS", "VALUE"]
    episodes = sorted({e[: e.index(0) + 1] if 0 in e else e for e in itertools.product(range(4), repeat=n)})
    words_of = [" ".join(f"{attempts[i]} {told[i] or ''}" for i in e).split() for e in episodes]
    rows = jnp.array([[names.index(word) for word in (row + ["PAD"] * length)[:length]] for row in words_of])
    got = jax.device_get(jax.vmap(lambda row: judge(env, task, row)[0])(rows))
    assert got.gold.tolist() == [e[-1] == 0 for e in episodes] and got.parts[:, 2].tolist() == [e == (0,) for e in episodes]

    def expected(logits, worth):  # logits [4,4]: after nothing or a verdict, the attempt
        logp = jax.nn.log_softmax(logits, axis=1)
        likely = [jnp.exp(sum(logp[a, b] for a, b in zip((0, *e), e, strict=False))) for e in episodes]
        return sum(p * w for p, w in zip(likely, worth, strict=True))

    logits = np.random.default_rng(0).normal(size=(4, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chain = p.copy()
    chain[0] = [1, 0, 0, 0]  # a right attempt is the last
    reached = p[0] @ np.linalg.matrix_power(chain, n - 1)
    np.testing.assert_allclose(expected(jnp.asarray(logits), got.gold), reached[0], rtol=1e-5)
    np.testing.assert_allclose(expected(jnp.asarray(logits), got.parts[:, 2]), p[0, 0], rtol=1e-5)

    def deaf(row, worth):
        return expected(jnp.tile(row[None], (4, 1)), worth)

    value, slope = jax.value_and_grad(deaf)(jnp.asarray(logits[0]), got.gold)
    single = jax.grad(lambda row: jax.nn.softmax(row)[0])(jnp.asarray(logits[0]))
    np.testing.assert_allclose(value, 1 - (1 - p[0, 0]) ** n, rtol=1e-5)
    np.testing.assert_allclose(slope, n * (1 - p[0, 0]) ** (n - 1) * single, rtol=1e-4)


def test_a_picture_is_cut_into_the_patches_that_its_pixels_spell():
    for (ink, colour), (rank, picture) in itertools.product(enumerate(glyphs.INKS), enumerate(glyphs.bitmaps())):
        for at, patch in enumerate(glyphs.patches()[ink, rank]):
            y, x = 2 * (at // 2), 2 * (at % 2)
            pixels = "".join("01"[int(picture[y + i, x + j])] for i in (0, 1) for j in (0, 1))
            assert glyphs.NAMES[patch] == ("blank" if pixels == "0000" else colour + pixels)


def test_ranks_look_different_and_no_place_tells_them_all_apart():
    looks = glyphs.patches()
    assert len({tuple(look) for look in looks.reshape(-1, looks.shape[2]).tolist()}) == 2 * 13
    assert all(len(set(looks[0, :, at].tolist())) < 13 for at in range(looks.shape[2]))


def recognised(text):
    """The words of a text with its pictures as the cards that they show, and their inks."""
    size = glyphs.patches().shape[2]
    ranks = {tuple(glyphs.NAMES[p] for p in look): (f"c{'A 2 3 4 5 6 7 8 9 10 J Q K'.split()[rank]}", glyphs.INKS[ink])
             for ink, of_ink in enumerate(glyphs.patches()) for rank, look in enumerate(of_ink)}
    found, inks, at = [], [], 0
    while at < len(text):
        card, ink = ranks.get(tuple(text[at : at + size]), (None, None))
        found.append(card or text[at])
        inks += [ink] if card else []
        at += size if card else 1
    return found, inks


def test_a_drawn_hand_is_the_hand_in_words_and_red_changes_the_ink_alone():
    for seed in range(20):
        key = jax.random.key(seed)
        said = words(TWICE, TWICE.prompt(TWICE.sample(key, 1))[0])
        for level, ink in ((1, "black"), (LEVELS.index("red") + 1, "red")):
            task = DRAWN.sample(key, level)
            text, inks = recognised(words(DRAWN, DRAWN.prompt(task)[0]))
            assert text == said and inks == [ink] * 2
            assert task.numbers.tolist() == TWICE.sample(key, 1).numbers.tolist()


@pytest.mark.parametrize("env", [TWICE, DRAWN])
def test_the_corpus_tells_the_truth_and_nothing_of_held_out_hands(env):
    docs = jax.device_get(jax.jit(jax.vmap(env.corpus))(jax.random.split(jax.random.key(0), 1000)))
    held = jax.device_get(tasks_of(TWICE, jax.random.key(2), LEVEL["held"]))[0].numbers
    hidden = {tuple(sorted(hand)) for hand in held.tolist()}
    kinds, hands = Counter(), Counter()
    for doc in docs:
        text, inks = recognised(words(env, doc[doc > 0]))
        hands[tuple(inks)] += 1
        if text[0].isdigit() and "TGT" in text:
            numbers, target = [int(word) for word in text[:2]], int(text[3])
            assert tuple(sorted(numbers)) not in hidden
            told = "RIGHT" if text[-1] == "EOS" else text[-1]
            assert verdict([*text[:2], "SEP", *text[5:]], numbers, target) == told
            kinds[told] += 1
        elif text[0].isdigit():
            at = text.index("SEP")
            assert value(text[:at]) == int(text[at + 1])
            assert tuple(sorted(int(word) for word in text[:at] if word.isdigit())) not in hidden
            kinds["value"] += 1
        else:
            rule, *dealt = text[:3]
            name = "JQK" if rule == "COUNT" else rule
            expected = [str(11 + name.index(c[1])) if c[1] in "JQK" and rule != "TEN" else
                        {"cA": "1", "cJ": "10", "cQ": "10", "cK": "10"}.get(c, c[1:]) for c in dealt]
            assert text[text.index("SEP") + 1 : -1] == expected
            kinds["asked" if "TGT" in text else "cards"] += 1
    assert len(kinds) == 7 and min(kinds.values()) > 80
    drawn = [hands[pair] for pair in itertools.product(glyphs.INKS, repeat=2)]
    assert sum(drawn) == (kinds["cards"] + kinds["asked"]) * (env is DRAWN) and min(drawn) >= 40 * (env is DRAWN)


@pytest.mark.parametrize("arguments, message", [
    ({"k": 5}, "k is 5"), ({"targets": (9, 8)}, "targets are 9 to 8"), ({"tries": 0}, "tries is 0"), ({"held": 1.0}, "held is 1.0"),
    ({"k": 4}, "for 4 cards at most 9 targets"), ({"held": 0.001}, "no task is left in one of the levels"),
])  # fmt: skip
def test_errors_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        make("cards", **arguments)
