"""Is a teacher's distribution on the student's own tokens worth more than its texts, and more than a verifier?

Imitation of a teacher is dense (a target for every token) and off-policy (its texts, not the student's); a policy
gradient is on-policy and sparse (one number per text); on-policy distillation is dense and on-policy. One teacher and one
barely supervised student of half its width per seed (environment Chain), then arms of equally many updates on equally many
texts:

    arm        texts of     learns from
    sft        the teacher  its tokens (sequence distillation)
    offline    the teacher  its distributions, KL(t || s)
    opd        the student  the teacher's distributions, KL(s || t)
    opd_token  the student  the teacher's log-probability of the sampled token, a policy gradient with discount 0
    grpo       the student  a verifier
    weak       the student  a noisy teacher's distributions; weak_grpo hands over to the verifier on a straight line,
                            strong_grpo does so from the good teacher
    *_few, *_many           opd and sft on 16 and on 1024 prompts in all; the teacher's texts are drawn once then
    slip       the student  the teacher's distributions, where the environment writes half of the last steps wrongly, so that
                            an answer must not repeat them; slip_seasoned from a teacher that has seen such slips, which
                            clean_seasoned has where nothing slips
    self       the student  its own distributions at the start, with the answer in the prompt; its start has read such
                            prompts, that of self_unread has not

The noisy teacher goes on from the good one with demonstrations whose steps are wrong with probability 1/8. Success is
measured on sampled texts (T = 1) of new tasks. Where maps are bijections and a teacher goes on from a wrong step, nothing
that a student learns about such states makes it right again: an exact table (tests/test_distill_twin.py) says that on-policy
distillation then has no less error with length than offline, and pays where the teacher mends errors. A teacher that is the
student with the same prompt teaches nothing, by definition (tests/test_distill.py).

Source: Lu and Thinking Machines Lab 2025 (On-Policy Distillation); Agarwal et al. 2023 (arXiv 2306.13649); Gu et al. 2023
(arXiv 2306.08543); with the answer in the prompt, OPSD (arXiv 2601.18734), whose teacher is the initial policy too. The
speed-up of the first over RL (7 to 10 times fewer steps) and Qwen3's (arXiv 2505.09388, a tenth of the GPU hours) compare a
large teacher with a small student; the price of training the teacher is in neither, and is not here.
Command: jaxpt run on_policy_distillation
Rates are those of SWEEP, seeds 10000 and 10001; that of opd_token is the highest and that of self the lowest tried.
Expected (seeds 0 to 7; at 1000 to 1007 the supported and the refuted claims lie on the same side, that on recovery
underpowered, and the two inconclusive ones change it, with 1.41 and 0.044): the start is at 0.59, the teacher at 0.96. From
there sft ends at 0.80, offline at 0.82, opd at 0.78, opd_token at 0.74, grpo at 0.73. On-policy distillation is at 0.7 after
45 updates and GRPO after 77 (not twice as many beyond doubt: inconclusive), SFT after 72; a FLOP of GRPO, which asks no teacher, buys as much. The error of offline distillation
grows less with length, not more (refuted), as the twin says. Sixteen prompts cost SFT 0.40 and on-policy distillation 0.24
(supported; it overfits them too, and 1024 cost neither anything). Handing over from a noisy teacher to the verifier gains
0.12, from a good one nothing; slips are mended from a teacher that has seen them (0.55 against 0.31), and neither of the two
learns them well. With the answer in the prompt the student is at 0.76, and distilled from that at 0.65, 0.06 above its start
(inconclusive at a margin of 0.05); where such prompts are new to it, it unlearns the task.
Minutes: 22 on two cores that five other programs shared (8 seeds); --tier smoke 1.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.markdown import table
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.distill import DistillConfig, make_distill
from jaxpt.train.optim import OptimConfig
from jaxpt.train.sft import SftConfig, make_sft

EVERY = 20  # updates between two evaluations, and of one chunk
WARMUP = 8  # updates of the teacher and of every arm: Adam begins anew at the fork
GOAL = 0.7  # success at T = 1 whose updates are counted
ROWS = ("sft", "forward_kl", "reverse_kl", "opd", "grpo_no_kl")
PLAIN = {"sft": "sft", "offline": "forward_kl", "opd": "reverse_kl", "opd_token": "opd", "grpo": "grpo_no_kl"}
ROW = PLAIN | {"self": "reverse_kl"}  # of the arms with a rate of their own
OFF = ("sft", "offline")  # arms on the teacher's texts
POOLS = {"few": 16, "many": 1024}


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    level: int = 3  # longest chain of maps
    corruption: float = 0.125  # share of wrong steps in what the noisy teacher imitates
    slip: float = 0.5  # share of tasks with a slip, where there are slips
    hint: float = 0.5  # share of prompts that tell the answer, of those that the informed start has read
    d_model: int = 32  # of the student; the teacher's is twice that
    n_layers: int = 2
    teacher_updates: int = 280
    more_updates: int = 60  # of the noisy teacher and of the one that sees slips, after those of the teacher
    start_updates: int = 80  # of the student, before the fork
    informed_updates: int = 120  # of the one that is its own teacher
    updates: int = 120  # of every arm after it, each on prompts x group texts
    batch: int = 64  # demonstrations per supervised update
    prompts: int = 32
    group: int = 4
    teacher_rate: float = 4e-3
    more_rate: float = 2e-3
    start_rate: float = 4e-3
    sft_rate: float = 0.004  # this and those below are tuned by SWEEP on seeds that no claim uses
    offline_rate: float = 0.004
    opd_rate: float = 0.0012
    opd_token_rate: float = 0.0024
    grpo_rate: float = 0.0012
    self_rate: float = 0.0003
    eval_tasks: int = 128  # fixed tasks, on which every arm is scored

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "prompts", "group", "eval_tasks")
        within(self, 2, 32, "level")
        within(self, 0, 0.8, "corruption")
        within(self, 0, 1, "slip", "hint")
        within(self, 0, 1, "teacher_rate", "more_rate", "start_rate", *(f"{arm}_rate" for arm in ROW))
        multiples(self, EVERY, "when arms are scored", "teacher_updates", "more_updates", "start_updates",
                  "informed_updates", "updates")

    def env(self, **options) -> EnvConfig:
        options = {"p": self.p, "generators": 4, "max_level": self.level, "corruption": self.corruption, **options}
        return EnvConfig("chain", options, (1, self.level))


def decayed(updates: int) -> OptimConfig:
    return OptimConfig(schedule="linear", warmup=WARMUP, decay_steps=updates, floor=0.1)


def stages(cfg: Config, inputs) -> list[Stage]:
    env, slips, ends = cfg.env(), cfg.env(slip=cfg.slip), {"shortest": (1, 1), "longest": (cfg.level, cfg.level)}
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    vocab = env.make().spec.vocab
    student = ModelConfig(vocab=vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    teacher = ModelConfig(vocab=vocab, d_model=2 * cfg.d_model, n_layers=cfg.n_layers)
    program = DistillConfig(
        env=env, model=student, teacher=teacher, optim=decayed(cfg.updates), objectives=ROWS, prompts=cfg.prompts,
        group=cfg.group, eval=EvalConfig(EVERY, cfg.eval_tasks, ends),
    )
    slippery = replace(program, env=slips)
    told = replace(program, teacher=student, seen=cfg.env(hint=1.0))

    def supervised(name, model, updates, rate, style="think", env=env, after=None, optim=OptimConfig()):
        config = SftConfig(env=env, model=model, optim=optim, batch=cfg.batch, style=style, eval=scored)
        return Stage(name, make_sft, config, updates, after, {"learning_rate": rate}, EVERY)

    def arm(name, of, after=("start", "teacher"), end=None, program=program, **leaves):
        rate = getattr(cfg, f"{of}_rate")
        hyper = program.arm({ROW[of]: 1.0}, end, own=float(of not in OFF), learning_rate=rate, **leaves)
        return Stage(name, make_distill, program, cfg.updates, after, hyper, EVERY, stream="arms")

    noisy, seasoned = ("start", "noisy"), ("start", "seasoned")
    verifier = {"end": {ROW["grpo"]: 1.0}, "anneal": float(cfg.updates)}
    return [
        supervised("teacher", teacher, cfg.teacher_updates, cfg.teacher_rate, optim=decayed(cfg.teacher_updates)),
        supervised("noisy", teacher, cfg.more_updates, cfg.more_rate, "think_noisy", after="teacher"),
        supervised("seasoned", teacher, cfg.more_updates, cfg.more_rate, env=slips, after="teacher"),
        supervised("start", student, cfg.start_updates, cfg.start_rate),
        supervised("informed", student, cfg.informed_updates, cfg.start_rate, env=cfg.env(hint=cfg.hint)),
        supervised("blind", student, EVERY, 0.0, after="informed"),  # it learns nothing: scored without the answer
        supervised("told", student, EVERY, 0.0, env=cfg.env(hint=1.0), after="informed"),
        *(arm(name, name) for name in PLAIN),
        arm("weak", "opd", noisy), arm("weak_grpo", "opd", noisy, **verifier), arm("strong_grpo", "opd", **verifier),
        *(arm(f"{of}_{size}", of, pool=float(pool)) for of in ("opd", "sft") for size, pool in POOLS.items()),
        arm("slip", "opd", program=slippery), arm("slip_seasoned", "opd", seasoned, program=slippery),
        arm("clean_seasoned", "opd", seasoned),
        arm("self", "self", ("informed", "informed"), program=told),
        arm("self_unread", "self", ("start", "start"), program=told),
    ]


def success(curves, arm):
    return last(curves[f"{arm}/sampled_gold"])


def crossing(curve: np.ndarray, updates: np.ndarray, goal: float) -> np.ndarray:
    """[seeds] the update at which success first reaches the goal, on straight lines between evaluations of curve [seeds, n]
    at `updates` [n]; the last update where it never does."""
    out = []
    for y in curve:
        reached = np.flatnonzero(y >= goal)
        if not reached.size or reached[0] == 0:
            out.append(updates[reached[0]] if reached.size else updates[-1])
            continue
        k = reached[0]
        out.append(updates[k - 1] + (updates[k] - updates[k - 1]) * (goal - y[k - 1]) / (y[k] - y[k - 1]))
    return np.array(out, float)


def updates_to_goal(curves, arm):
    curve = curves[f"{arm}/sampled_gold"]
    due = np.arange(EVERY - 1, curve.shape[1], EVERY)
    begun = success(curves, {"self": "blind"}.get(arm, "start"))
    return np.maximum(crossing(np.column_stack([begun, curve[:, due]]), np.array([0, *(due + 1.0)]), GOAL), 1.0)


def speed_up(arm, over="grpo"):
    return lambda curves: np.log2(updates_to_goal(curves, over) / updates_to_goal(curves, arm))


def growth(curves, arm):
    """Of the error with length: on the longest chains less that on single maps."""
    short, long = (last(curves[f"{arm}/sampled_gold_{end}"]) for end in ("shortest", "longest"))
    return short - long


def steeper(arm, than="opd"):
    return lambda curves: growth(curves, arm) - growth(curves, than)


def price(size):
    """What so few prompts cost sft, less what they cost opd."""
    lost = lambda curves, arm: success(curves, arm) - success(curves, f"{arm}_{size}")  # noqa: E731
    return lambda curves: lost(curves, "sft") - lost(curves, "opd")


def ahead(arm, of):
    return lambda curves: success(curves, arm) - success(curves, of)


CLAIMS = (
    Claim(
        name="dense_beats_sparse",
        statement=f"GRPO takes more than twice the updates of on-policy distillation to a success of {GOAL} (log2 of their "
        "ratio; an arm that never gets there counts as its last update).",
        estimand=speed_up("opd"), margin=1.0, control_name="the noisy teacher's distributions", control=speed_up("weak"),
    ),
    Claim(
        name="own_texts_spare_long_chains",
        statement="From one map to the longest chain the error of offline distillation grows by 0.02 more than that of "
        "on-policy distillation.",
        estimand=steeper("offline"), margin=0.02,
        control_name="on-policy distillation with sampled tokens", control=steeper("opd_token"),
    ),
    Claim(
        name="few_prompts_are_enough_on_policy",
        statement="Sixteen prompts in the place of new ones cost imitation of the teacher's texts 0.05 more success than "
        "on-policy distillation.",
        estimand=price("few"), margin=0.05, control_name="1024 prompts", control=price("many"),
    ),
    Claim(
        name="the_verifier_lifts_a_weak_teacher_s_ceiling",
        statement="Handing over from the noisy teacher to the verifier ends 0.05 above distillation to the end.",
        estimand=ahead("weak_grpo", "weak"), margin=0.05,
        control_name="handing over from the good teacher", control=ahead("strong_grpo", "opd"),
    ),
    Claim(
        name="a_teacher_teaches_no_recovery_that_it_has_not_seen",
        statement="Where the environment slips, on-policy distillation from a teacher that has seen slips ends 0.1 above "
        "that from one that has not.",
        estimand=ahead("slip_seasoned", "slip"), margin=0.1,
        control_name="the same teachers where nothing slips", control=ahead("clean_seasoned", "opd"),
    ),
    Claim(
        name="the_answer_makes_a_teacher",
        statement="Distilled from itself with the answer in the prompt, a student that has read such prompts ends 0.05 above "
        "its start.",
        estimand=ahead("self", "blind"), margin=0.05,
        control_name="a student that has never read such prompts", control=ahead("self_unread", "start"),
    ),
)

LABELS = {
    "SFT on the teacher's texts": "sft", "offline distributions": "offline", "on-policy, distributions": "opd",
    "on-policy, sampled tokens": "opd_token", "GRPO": "grpo",
}
WEAK = {"noisy teacher": "weak", "noisy teacher, then verifier": "weak_grpo", "teacher, then verifier": "strong_grpo"}
OWN = {"with the answer, prompts known": "self", "prompts never read": "self_unread"}
SLIPS = {"teacher has seen slips": "slip_seasoned", "teacher has not": "slip", "has seen slips, none here": "clean_seasoned"}
POOLED = {
    "on-policy, 16 prompts": "opd_few", "on-policy, 1024": "opd_many", "SFT, 16 prompts": "sft_few", "SFT, 1024": "sft_many",
}
PANELS = (
    Panel("Success at T = 1", per_arm("sampled_gold", LABELS), "success", "update"),
    Panel("By the FLOPs of products", per_arm("sampled_gold", LABELS), "success", "FLOPs", per_arm("flops", LABELS)),
    Panel("KL to the teacher on the arm's texts", per_arm("reverse_kl", LABELS), "nats per token", "update"),
    Panel("A noisy teacher", per_arm("sampled_gold", WEAK | {"GRPO": "grpo"}), "success", "update"),
    Panel("Few prompts", per_arm("sampled_gold", POOLED), "success", "update"),
    Panel("Slips of the environment", per_arm("sampled_gold", SLIPS), "success", "update"),
    Panel("The student as its own teacher", per_arm("sampled_gold", OWN | {"GRPO": "grpo"}), "success", "update"),
)

RATES = {
    **dict.fromkeys(("sft", "offline"), (1e-3, 2e-3, 4e-3, 8e-3)), "opd": (6e-4, 1.2e-3, 2.4e-3, 4.8e-3),
    **dict.fromkeys(("opd_token", "grpo"), (3e-4, 6e-4, 1.2e-3, 2.4e-3)), "self": (3e-4, 6e-4, 1.2e-3),
}
SWEEP = (  # scripts/tune.py on_policy_distillation
    {f"{arm}_rate": (RATES[arm], f"{arm}/sampled_gold") for arm in ROW},
)


def noisy_success(cfg: Config) -> float:
    """Probability that the noisy teacher's demonstrations end right (jaxpt.envs.chain states the formula)."""
    keep = 1 - cfg.corruption * cfg.p / (cfg.p - 1)
    return float(np.mean([1 / cfg.p + (1 - 1 / cfg.p) * keep**d for d in range(1, cfg.level + 1)]))


def sections(cfg: Config, curves) -> str:
    rows = []
    for label, arm in (LABELS | WEAK | POOLED | SLIPS | OWN).items():
        at = updates_to_goal(curves, arm)
        reached = np.nanmax(curves[f"{arm}/sampled_gold"], axis=1) >= GOAL
        flops = np.mean(curves[f"{arm}/flops"][:, -1] / cfg.updates * at)
        errors = [f"{1 - np.mean(last(curves[f'{arm}/sampled_gold_{end}'])):.3f}" for end in ("shortest", "longest")]
        rows.append([label, cell(success(curves, arm)), f"{np.mean(last(curves[f'{arm}/greedy_gold'])):.3f}",
                     f"{np.mean(at):.0f} ({int(np.sum(reached))} of {len(at)})", f"{flops:.3g}", *errors])
    taught = ", ".join(f"{name} {cell(success(curves, stage))}"
                       for name, stage in (("the teacher", "teacher"), ("the noisy one", "noisy"), ("the start", "start")))
    own = ", ".join(f"{name} {cell(success(curves, stage))}" for name, stage in (("with it", "told"), ("without", "blind")))
    return "\n\n".join([
        "## The arms at the end",
        f"Success at T = 1: {taught}; the noisy demonstrations {noisy_success(cfg):.4f} (exact). A student that has read "
        f"prompts with the answer, before it is its own teacher: {own}.",
        table(["arm", "success", "greedy", f"updates to {GOAL} (seeds that get there)", "FLOPs to it", "error, one map",
               f"error, {cfg.level} maps"], rows),
        "The teachers' own training is in none of these FLOPs.",
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(level=2, n_layers=1, teacher_updates=20, more_updates=20, start_updates=20,
                             informed_updates=20, updates=20, batch=32, prompts=8, eval_tasks=32), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(level=8, d_model=64, teacher_updates=2000, start_updates=100, updates=500), seeds=20),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
