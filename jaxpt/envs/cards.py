"""Cards: make a target from the cards of a hand, each used once, where a rule says what the faces count.

A prompt `RULE c1 .. ck TGT t SEP` asks for the numbers of the cards and a formula over them, in reverse Polish
notation: `n1 .. nk SEP n n op n op EOS`. The rule TEN counts J, Q and K as 10, the rule COUNT as 11, 12 and 13, and
five further rules as the other permutations of 11, 12 and 13. A level is a population of tasks:

    1 seen     hands that training may see, under TEN
    2 held     hands held out, under TEN
    3 faces    seen hands with a face card, under TEN: as 4 but for the rule
    4 shift    seen hands with a face card, under COUNT
    5 diverse  seen hands, under TEN or one of the five permuted rules
    6 once     as 1, with one attempt; only where others have several, or cards are drawn
    7 red      as 1, in red ink; only where cards are drawn

Where they are drawn, a card is not a token but a picture of its rank in the ink of its suit, as the tokens of its
patches (jaxpt.envs.glyphs): black in all levels but the last, either in the corpus.

A hand is held out if the multiset of its numbers is, so that neither the order of the cards nor another face of the
same number gives it away; the corpus shows no solution of these either. Tasks are uniform over the hands (as
multisets of cards) and targets that have a solution. The task is GeneralPoints of Chu et al. 2025 (arXiv 2501.17161)
with a formula that an automaton can read.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs import formulas, glyphs
from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.types import Array, Key

RANKS = ("A", *map(str, range(2, 11)), "J", "Q", "K")
FACE = 11  # ranks from here on are faces
FACES = ((10, 10, 10), *itertools.permutations((11, 12, 13)))  # what J, Q, K count, by rule
TEN, COUNT = 0, 1
LEVELS = ("seen", "held", "faces", "shift", "diverse", "once", "red")
SEEN, COUNTED, DIVERSE, ONCE, RED = (1 + LEVELS.index(name) for name in ("seen", "shift", "diverse", "once", "red"))

PAD, EOS, SEP, TGT, PLUS = range(5)
RULE = PLUS + len(formulas.OPERATIONS)
CARD = RULE + len(FACES)  # behind the tokens of cards, or of patches, come the numbers from 1, then the verdicts
SLACK = 1  # tokens of an attempt beyond what a right one takes
LARGEST = 2**24  # bytes of the table of solutions

OPEN, SYNTAX, NUMBERS, VALUE, RIGHT = range(5)  # verdicts


class Task(NamedTuple):
    rule: Array  # []
    cards: Array  # [k] ranks 1..13, as dealt
    numbers: Array  # [k] what they count under the rule
    target: Array  # []
    hand: Array  # [] row of the table of solutions: the sorted numbers
    tries: Array | None = None  # [] attempts; None where no level has fewer than the environment
    ink: Array | None = None  # [] 0 black, 1 red; None likewise


class State(NamedTuple):
    attempt: Array  # [] int32, 1, 2, ..
    count: Array  # [] int32, tokens read in this attempt
    verdict: Array  # [] int32, OPEN while the attempt goes on
    well: Array  # [] bool, the attempt keeps to the grammar
    true: Array  # [] bool, all numbers so far are the hand's
    unused: Array  # [k] bool, numbers that the formula has not used yet
    text: Array  # [2k-1] int32, the formula's tokens
    top: Array  # [k] int32, the stack's numerators
    bottom: Array  # [k] int32, and denominators; 0 where there is no value
    depth: Array  # [] int32


def _counts() -> tuple[np.ndarray, np.ndarray]:
    """[rules,14]: the number of a rank; the rank that stands for a rank of COUNT (of TEN: itself)."""
    plain = np.tile(np.arange(14, dtype=np.int32), (len(FACES), 1))
    number, stands = plain.copy(), plain.copy()
    for rule, faces in enumerate(FACES):
        number[rule, FACE:] = faces
        if rule != TEN:
            stands[rule, list(faces)] = np.arange(FACE, 14)
    return number, stands


def _piles(found: formulas.Table, low: int, held: float, seed: int) -> list[np.ndarray]:
    """Items [N,k+2] (ranks ascending, target, row of the table): seen, held and faces under TEN, then with faces
    and all of the seen under COUNT."""
    row = {tuple(hand): i for i, hand in enumerate(found.hands.tolist())}
    hidden = np.zeros(len(row), bool)
    hidden[np.random.RandomState(seed).permutation(len(row))[: round(held * len(row))]] = True  # a frozen stream
    number, _ = _counts()

    def items(rule: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.array([row[tuple(number[rule, hand].tolist())] for hand in found.hands])
        at, target = np.nonzero(found.solvable[rows])
        dealt = np.concatenate([found.hands[at], target[:, None] + low, rows[at, None]], 1).astype(np.int32)
        return dealt, hidden[rows[at]], (found.hands[at] >= FACE).any(1)

    ten, ten_hidden, ten_face = items(TEN)
    count, count_hidden, count_face = items(COUNT)
    return [ten[~ten_hidden], ten[ten_hidden], ten[~ten_hidden & ten_face], count[~count_hidden & count_face],
            count[~count_hidden]]


def cards(
    k: int = 3, targets: tuple[int, int] = (6, 30), tries: int = 1, held: float = 0.2, seed: int = 0,
    pictures: bool = False,
) -> Environment:
    """Make a target from a hand of cards, under a rule that says what the faces count.

    Reward and gold are 1 where an attempt is right: well-formed, with the hand's numbers in the order of the cards, and
    a formula that uses each once and equals the target exactly. With several tries the environment answers a failed
    attempt by its verdict (SYNTAX, NUMBERS or VALUE, the first that applies) and lets the policy try again. Parts:
    `syntax` (the last attempt is well-formed), `numbers` (and has the right numbers) and, with several tries, `first`
    (the first attempt is right: what a single try would have been worth). Signals: `read_right`,
    `read_wrong` (a card's number as it is written, or not), `read_as_ten` (a face that is written as 10 where it counts
    otherwise) and `malformed` (this token leaves the grammar); `step_labels` says the first two of a whole response.

    Style `canonical` writes the same solution of a hand every time (the first of the table, whatever the cards' order);
    `any` draws one of all, uniformly. Both go on from what stands there and give up an attempt that is lost.

    Args:
      k: cards in a hand, 2 to 4.
      targets: the least and the greatest target, from 1 to 99.
      tries: attempts per episode.
      held: share of the multisets of numbers that are held out.
      seed: picks them.
      pictures: a card in a prompt is a picture of its rank, and not a token.

    Raises:
      ValueError: an argument is outside the range above, a population is empty, or the solutions of so many targets
      take more than 16 MiB.
    """
    low, high = targets
    if k not in (2, 3, 4):
        raise ValueError(f"k is {k}, but a hand has 2 to 4 cards")
    if not 1 <= low <= high <= 99:
        raise ValueError(f"targets are {low} to {high}, but must be an ascending range from 1 to 99")
    if tries < 1:
        raise ValueError(f"tries is {tries}, but must be at least 1")
    if not 0 < held < 1:
        raise ValueError(f"held is {held}, but must be a share between 0 and 1")
    most = LARGEST // formulas.table_size(k)
    if high - low + 1 > most:
        raise ValueError(f"targets are {low} to {high}, but for {k} cards at most {most} targets are allowed")
    found = formulas.table(k, low, high)
    piles = _piles(found, low, held, seed)
    if not all(map(len, piles)):
        raise ValueError(f"held is {held}, but with targets {low} to {high} no task is left in one of the levels")
    items, sizes = np.concatenate(piles), np.array([len(pile) for pile in piles], np.int32)
    starts = (np.cumsum(sizes) - sizes).astype(np.int32)
    number, stands = _counts()
    gap = max(low, formulas.HIGHEST + 1) - formulas.HIGHEST - 1  # numbers between 13 and the targets have no token
    further = [str(x) for x in range(formulas.HIGHEST + 1 + gap, high + 1)]
    verdicts = ("SYNTAX", "NUMBERS", "VALUE") if tries > 1 else ()
    shows = glyphs.NAMES if pictures else tuple("c" + rank for rank in RANKS)
    ones = CARD + len(shows)  # the token of 1
    told = ones + formulas.HIGHEST + len(further)  # the token of the verdict SYNTAX
    looks = CARD + glyphs.patches()  # [inks,ranks,patches] tokens of a picture
    names = ("PAD", "EOS", "SEP", "TGT", *formulas.OPERATIONS, "TEN", "COUNT",
             *("".join("JQK"[faces.index(x)] for x in (11, 12, 13)) for faces in FACES[COUNT + 1 :]),
             *shows, *map(str, range(1, formulas.HIGHEST + 1)), *further, *verdicts)
    size, last = 2 * k - 1, 3 * k  # tokens of a formula; index of a right attempt's EOS
    length = last + 1 + SLACK
    spec = Spec(
        vocab=len(names), prompt_len=k * (looks.shape[2] if pictures else 1) + 4, response_len=tries * (length + 1) - 1,
        signals=("read_right", "read_wrong", "read_as_ten", "malformed"),
        parts=("syntax", "numbers", "first")[: 2 + (tries > 1)], max_level=RED if pictures else ONCE if tries > 1 else DIVERSE,
        styles=("canonical", "any"), token_names=names,
    )  # fmt: skip

    def token_of(x: Array) -> Array:
        return ones + x - 1 - jnp.where(x > formulas.HIGHEST, gap, 0)

    def number_of(token: Array) -> Array:
        """The number that a token names, 0 if none."""
        x = token - ones + 1
        named = (token >= ones) & (token < told)
        return jnp.where(named, x + jnp.where(x > formulas.HIGHEST, gap, 0), 0)

    def pick(die: Array, count: Array | int) -> Array:
        """0 .. count - 1, from a die that is uniform in [0, 1)."""
        return (die * count).astype(jnp.int32)

    def deal(dice: Array, pile: Array) -> tuple[Array, Array, Array]:
        """Ranks in random order, target and row of an item of a pile, from 1 + k dice."""
        item = jnp.asarray(items)[jnp.asarray(starts)[pile] + pick(dice[0], jnp.asarray(sizes)[pile])]
        return item[:k][jnp.argsort(dice[1:])], item[k], item[k + 1]

    def sample(key: Key, level: Array) -> Task:
        dice = jax.random.uniform(key, (2 + k,))  # one call of the generator: each takes a third of a second to compile
        drawn = pick(dice[0], len(FACES) - 1)
        diverse = jnp.where(drawn == TEN, TEN, drawn + 1)  # any rule but COUNT
        level = jnp.asarray(level, jnp.int32)
        own = ()
        if spec.max_level > DIVERSE:
            own = jnp.where(level == ONCE, 1, jnp.int32(tries)), (level == RED).astype(jnp.int32)
            level = jnp.where(level > DIVERSE, SEEN, level)  # the same hands
        rule = jnp.where(level == DIVERSE, diverse, jnp.where(level == COUNTED, COUNT, TEN))
        pile = jnp.where((level == DIVERSE) & (rule == TEN), 0, level - 1)
        ranks, target, hand = deal(dice[1:], pile)
        dealt = jnp.asarray(stands)[rule, ranks]
        return Task(rule, dealt, jnp.asarray(number)[rule, dealt], target, hand, *own)

    def laid(dealt: Array, ink: Array | None) -> Array:
        """The tokens of cards in a prompt; one ink for all, or one for each."""
        return jnp.asarray(looks)[ink, dealt - 1].reshape(-1) if pictures else CARD - 1 + dealt

    def prompt(task: Task) -> tuple[Array, Array]:
        asked = [RULE + task.rule, *laid(task.cards, task.ink), jnp.int32(TGT), token_of(task.target), jnp.int32(SEP)]
        return jnp.stack(asked), jnp.int32(spec.prompt_len)

    def begin(attempt: Array) -> State:
        zero, yes = jnp.int32(0), jnp.bool_(True)
        stack = jnp.zeros(k, jnp.int32)
        return State(attempt, zero, zero, yes, yes, jnp.ones(k, bool), jnp.zeros(size, jnp.int32), stack, stack, zero)

    def init(task: Task, key: Key) -> State:
        return begin(jnp.int32(1))

    def closed(state: State) -> Array:
        return (state.verdict != OPEN) | (state.count >= length)

    def pending(task: Task, state: State) -> Array:
        verdict = told + jnp.maximum(state.verdict, SYNTAX) - SYNTAX  # an attempt that was cut has broken the syntax
        ends = (state.verdict == RIGHT) | (state.attempt >= (tries if task.tries is None else task.tries))
        return jnp.where(closed(state), jnp.where(ends, DONE, verdict), POLICY)

    def fits(state: State, token: Array) -> Array:
        """The token keeps to the grammar."""
        x, at = number_of(token), state.count
        operation = (token >= PLUS) & (token < RULE)
        formula = ((x > 0) & (state.depth < k)) | (operation & (state.depth >= 2))
        ends = (token == EOS) & (state.depth == 1) & (at > k)
        return jnp.where(at < k, x > 0, jnp.where(at == k, token == SEP, ends | (formula & (at < last))))

    def read(task: Task, state: State, token: Array) -> State:
        x, at = number_of(token), state.count
        well = state.well & fits(state, token)
        pushes, joins = well & (at > k) & (x > 0), well & (at > k) & (token >= PLUS) & (token < RULE)
        hit = state.unused & (task.numbers == x)
        used = jnp.where(pushes, (jnp.arange(k) == jnp.argmax(hit)) & hit, False)
        named = jnp.where(at < k, x == task.numbers[jnp.minimum(at, k - 1)], ~pushes | hit.any())
        true = state.true & named
        over, under = jnp.maximum(state.depth - 1, 0), jnp.maximum(state.depth - 2, 0)
        pair = combined((state.top[under], state.bottom[under]), (state.top[over], state.bottom[over]), token)
        place = jnp.where(pushes, state.depth, jnp.where(joins, under, k))  # k is nowhere
        put = jnp.arange(k) == place
        top = jnp.where(put, jnp.where(pushes, x, pair[0]), state.top)
        bottom = jnp.where(put, jnp.where(pushes, 1, pair[1]), state.bottom)
        equal = (state.bottom[0] != 0) & (state.top[0] == task.target * state.bottom[0])
        judged = jnp.where(equal, RIGHT, VALUE)
        judged = jnp.where(well, jnp.where(true & ~state.unused.any(), judged, NUMBERS), SYNTAX)
        return State(
            state.attempt, at + 1, jnp.where(token == EOS, judged, OPEN), well, true, state.unused & ~used,
            jnp.where(jnp.arange(size) == at - k - 1, token, state.text), top, bottom, state.depth + pushes - joins,
        )  # fmt: skip

    def combined(a: tuple[Array, Array], b: tuple[Array, Array], token: Array) -> Array:
        """[2] numerator and denominator of a and b under the operation of the token."""
        return jnp.stack([jnp.stack(pair) for pair in formulas.combine(a, b)])[jnp.clip(token - PLUS, 0, 3)]

    def feed(task: Task, state: State, token: Array) -> State:
        over, going = pending(task, state) == DONE, ~closed(state)

        def which(old: Array, again: Array, new: Array) -> Array:
            return jnp.where(over, old, jnp.where(going, new, again))

        return jax.tree.map(which, state, begin(state.attempt + 1), read(task, state, token))

    def signals(task: Task, state: State, token: Array) -> Array:
        x, at = number_of(token), jnp.minimum(state.count, k - 1)
        alive = state.well & ~closed(state)
        reads = alive & (state.count < k) & (x > 0)
        right = x == task.numbers[at]
        as_ten = ~right & (x == 10) & (task.cards[at] >= FACE)
        events = [reads & right, reads & ~right, reads & as_ten, alive & ~fits(state, token)]
        return jnp.stack(events).astype(jnp.float32)

    def outcome(task: Task, state: State) -> Outcome:
        right = (state.verdict == RIGHT).astype(jnp.float32)
        parts = [state.verdict > SYNTAX, state.verdict > NUMBERS, (state.verdict == RIGHT) & (state.attempt == 1)]
        parts = jnp.stack(parts[: len(spec.parts)]).astype(jnp.float32)
        return Outcome(right, right, parts, (state.verdict == OPEN) | (pending(task, state) != DONE))

    def solutions(hand: Array, target: Array) -> tuple[Array, Array]:
        """The tokens [F,2k-1] of every formula of a hand, and which of them solve it [F]."""
        codes = jnp.asarray(found.codes)
        numbers = jnp.asarray(found.hands)[hand]
        tokens = jnp.where(codes < k, token_of(numbers[jnp.minimum(codes, k - 1)]), PLUS + codes - k)
        bits = jnp.asarray(found.solves)[hand, target - low]
        return tokens, jnp.unpackbits(bits)[: len(found.codes)] > 0

    def choose(die: Array, open_: Array) -> Array:
        """The index of one of those that are True, uniformly."""
        ranks = jnp.cumsum(open_)
        return jnp.argmax(ranks > pick(die, ranks[-1]))

    def oracle(task: Task, state: State, key: Key, style: Array) -> Array:
        at = state.count
        tokens, open_ = solutions(task.hand, task.target)
        open_ &= ((tokens == state.text[None]) | (jnp.arange(size) >= at - k - 1)[None]).all(1)
        drawn = choose(jax.random.uniform(key), open_)
        onward = tokens[jnp.where(style == 0, jnp.argmax(open_), drawn), jnp.clip(at - k - 1, 0, size - 1)]
        lost = ~state.well | ~state.true | ~open_.any() | (at >= last)
        link = jnp.where(at == k, SEP, onward)
        return jnp.where(lost, EOS, jnp.where(at < k, token_of(task.numbers[jnp.minimum(at, k - 1)]), link))

    def step_labels(task: Task, tokens: Array) -> Array:
        def one(state: State, token: Array) -> tuple[State, Array]:
            right, wrong, _, _ = signals(task, state, token)
            return feed(task, state, token), jnp.where(right > 0, 1, jnp.where(wrong > 0, 0, -1))

        return jax.lax.scan(one, init(task, None), tokens)[1]

    def corpus(key: Key) -> Array:
        """One document: numbers of cards under any rule, alone or asked as in a prompt; the value of a formula; a
        formula for numbers (seen hands alone); with several tries, a failed formula and its verdict."""
        dice = jax.random.uniform(key, (6 + (3 if pictures else 2) * k,))
        rule, goal = pick(dice[1], len(FACES)), low + pick(dice[2], high + 1 - low)
        dealt = 1 + pick(dice[6 + k : 6 + 2 * k], len(RANKS))
        ink = pick(dice[-k:], len(glyphs.INKS)) if pictures else None
        numbers, target, hand = deal(dice[5 : 6 + k], jnp.int32(4))
        tokens, right = solutions(hand, target)
        solution = tokens[choose(dice[3], right)]
        end, sep = jnp.array([EOS]), jnp.array([SEP])
        shown = jnp.concatenate([(RULE + rule)[None], laid(dealt, ink)])
        counted = jnp.concatenate([sep, token_of(jnp.asarray(number)[rule, dealt]), end])
        ask, value = jnp.stack([jnp.int32(TGT), token_of(goal)]), token_of(target)[None]
        given = jnp.concatenate([token_of(numbers), jnp.array([TGT]), value, sep])
        kinds = [[shown, counted], [shown, ask, counted], [solution, sep, value, end], [given, solution, end]]
        if tries > 1:
            slip = number_of(solution[0]) % formulas.HIGHEST + 1
            misread = solution.at[0].set(token_of(slip))
            kinds += [[given, solution[:-1], end, jnp.array([told])], [given, misread, end, jnp.array([told + 1])],
                      [given, tokens[choose(dice[4], ~right)], end, jnp.array([told + 2])]]
        blank = jnp.zeros(spec.prompt_len + spec.response_len, jnp.int32)
        texts = [jnp.concatenate(parts).astype(jnp.int32) for parts in kinds]
        return jnp.stack([blank.at[: len(text)].set(text) for text in texts])[pick(dice[0], len(kinds))]

    return Environment(
        name="cards", spec=spec, sample=sample, prompt=prompt, init=init, pending=pending, feed=feed,
        signals=signals, outcome=outcome, oracle=oracle, step_labels=step_labels, corpus=corpus,
    )  # fmt: skip
