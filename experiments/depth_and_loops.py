"""Does going through one layer four times do what four layers do, and does thinking aloud replace either?

A small decoder learns from demonstrations to compose maps (environment Chain), with the answer at once or one step at a
time. Direct answers ask for a computation as deep as the chain is long. Arms: one layer; four; one layer gone through
four times with the same weights (equal parameters with the first, equal products with the second); and one layer with a
feed-forward part four times as wide, which has more parameters than the looped one but no depth. One layer and four also
learn to think aloud. Every arm has a learning rate of its own. One layer learns to answer at once a second time, from other
demonstrations: what two runs differ by where neither has more depth.

Source: Dehghani et al. 2018 (arXiv 1807.03819) for loops; Merrill et al. 2024 (arXiv 2404.08819) and Li et al. 2024 (arXiv
2402.12875) for what depth and chains of thought can express.
Command: jaxpt run depth_and_loops
Expected (seeds 0 to 7): gone through four times, one layer is right in 0.922 of answers at once, in one pass in 0.722, with a
wide feed-forward part in 0.776: loops beat one pass by 0.201 and width by 0.146. Four layers are at 0.957; whether they beat
loops by 0.03 is underpowered (0.034, 95% -0.002 to 0.070). Thinking aloud, one layer is at 0.945 and four at 0.995, so what
three more layers are worth falls by 0.186, from 0.235 to 0.049. All controls are refuted but that of the first claim: a second
run of one layer differs from the first by 0.002 in the mean, but by too much from seed to seed (underpowered). Rates 2e-3, of
four layers that answer at once 5e-4.
Minutes: 18 on two cores that others used too (8 CPU-minutes, 8 seeds); --tier smoke about 1.
"""

import math
from dataclasses import dataclass, replace

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.models.counts import active_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.sft import SftConfig, make_sft

EVERY = 20  # updates of one chunk
SHAPES = {  # arm -> what differs from one layer
    "one": {}, "four": {"n_layers": 4}, "loop": {"loops": 4}, "wide": {"d_ff": 4},
}
STYLES = {"direct": tuple(SHAPES), "think": ("one", "four")}  # style -> the shapes that learn it
ARMS = tuple(f"{shape}_{style}" for style, shapes in STYLES.items() for shape in shapes)


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    generators: int = 4
    level: int = 3  # longest chain of maps
    d_model: int = 32
    updates: int = 600
    batch: int = 64
    one_direct_rate: float = 2e-3  # the six rates are tuned by SWEEP on seeds that no claim uses
    four_direct_rate: float = 5e-4
    loop_direct_rate: float = 2e-3
    wide_direct_rate: float = 2e-3
    one_think_rate: float = 2e-3
    four_think_rate: float = 2e-3
    every: int = 100  # updates between two evaluations
    eval_tasks: int = 256

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "batch", "eval_tasks")
        within(self, 2, 32, "level")
        within(self, 0, 1, *(f"{arm}_rate" for arm in ARMS))
        multiples(self, EVERY, "when arms are scored", "updates", "every")
        try:
            self.env()
        except ValueError as error:
            raise ValueError(f"--p {self.p} --generators {self.generators}: {error}") from None

    def env(self) -> EnvConfig:
        return EnvConfig("chain", {"p": self.p, "generators": self.generators, "max_level": self.level}, (1, self.level))

    def model(self, arm: str) -> ModelConfig:
        one = ModelConfig(vocab=self.env().make().spec.vocab, d_model=self.d_model, n_layers=1)
        shape = dict(SHAPES[arm])
        if "d_ff" in shape:
            shape["d_ff"] *= one.ff
        return replace(one, **shape)


def stages(cfg: Config, inputs) -> list[Stage]:
    def arm(name, style):
        program = SftConfig(
            env=cfg.env(), model=cfg.model(name), batch=cfg.batch, style=style, eval=EvalConfig(cfg.every, cfg.eval_tasks)
        )
        hyper = {"learning_rate": getattr(cfg, f"{name}_{style}_rate")}
        return Stage(f"{name}_{style}", make_sft, program, cfg.updates, stream=style, hyper=hyper, chunk=EVERY)

    again = replace(arm("one", "direct"), name="again_direct", stream="again")
    return [*(arm(name, style) for style, shapes in STYLES.items() for name in shapes), again]


def success(curves, arm, style="direct"):
    return last(curves[f"{arm}_{style}/greedy_gold"])


def more(arm, other, style="direct"):
    return lambda curves: success(curves, arm, style) - success(curves, other, style)


CLAIMS = (
    Claim(
        name="loops_beat_one_pass",
        statement="One layer gone through four times answers at once more often right than one pass, at equal parameters.",
        estimand=more("loop", "one"), margin=0.05,
        control_name="one pass, learnt from other demonstrations, in the place of the loop", control=more("again", "one"),
    ),
    Claim(
        name="loops_beat_width",
        statement="It also beats one pass through a layer with a feed-forward part four times as wide.",
        estimand=more("loop", "wide"), margin=0.03,
        control_name="one pass in the place of the loop", control=more("one", "wide"),
    ),
    Claim(
        name="own_weights_beat_loops",
        statement="Four layers with weights of their own beat one layer gone through four times.",
        estimand=more("four", "loop"), margin=0.03,
        control_name="the wide layer in the place of the four", control=more("wide", "loop"),
    ),
    Claim(
        name="thinking_makes_depth_needless",
        statement="What four layers are worth over one is less when the demonstrations think aloud.",
        estimand=lambda curves: more("four", "one")(curves) - more("four", "one", "think")(curves), margin=0.05,
        control_name="one layer's second run in the place of the four that answer at once",
        control=lambda curves: more("again", "one")(curves) - more("four", "one", "think")(curves),
    ),
)

NAMES = {"one layer": "one", "four": "four", "one, four times": "loop", "one, wide": "wide"}
PANELS = tuple(
    Panel(
        f"Greedy success, {style}", {label: f"{arm}_{style}/greedy_gold" for label, arm in NAMES.items() if arm in shapes},
        "success", "update",
    )
    for style, shapes in STYLES.items()
)

RATES = {"direct": (1e-3, 2e-3, 4e-3), "think": (1e-3, 2e-3, 4e-3, 8e-3)}
LOWER = {"four_direct": (2.5e-4, 5e-4)}
SCORE = {"direct": "greedy_gold", "think": "sampled_gold"}  # greedy, four layers that think aloud are always right
SWEEP = ({
    f"{shape}_{style}_rate": (LOWER.get(f"{shape}_{style}", ()) + RATES[style], f"{shape}_{style}/{SCORE[style]}")
    for style, shapes in STYLES.items() for shape in shapes
},)


def sections(cfg: Config, curves) -> str:
    rows = [
        f"| {label} | {cell(success(curves, arm), '.3f')} | {cell(success(curves, arm, 'think')) if arm in STYLES['think'] else ''} | "
        f"{active_flops(cfg.model(arm), 1, 16) / active_flops(cfg.model('one'), 1, 16):.2f} |"
        for label, arm in NAMES.items()
    ]
    head = ["| arm | success, direct | success, thinking | products per token, of one layer's |", "| --- | --- | --- | --- |"]
    return "\n".join(["## Depth, loops and thinking", "", *head, *rows])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(updates=20, every=20, eval_tasks=32, batch=16, level=2), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(replace(Config(), level=6, d_model=64, updates=5000), seeds=20),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
