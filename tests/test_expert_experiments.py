"""The experiments on experts, adapters, optimizers and depth: arms that are comparable, claims that read what is measured."""

import dataclasses
import importlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.experiments import lora_laws, moe_granularity, muon_qknorm
from jaxpt.lab.experiment import topological
from jaxpt.models import make_model
from jaxpt.models.counts import active_flops, active_params, param_counts
from jaxpt.models.lora import init_lora

NAMES = (
    "moe_balance", "moe_granularity", "expert_dropout", "moe_rl_routing", "muon_qknorm", "lora_laws", "depth_and_loops",
    "gspo_moe",
)
SEEDS, STEPS = 4, 200


class Curves(dict):
    """Positive noise for every metric of a known stage; remembers what was asked for."""

    def __init__(self, stages):
        super().__init__(seeds=np.arange(SEEDS))
        self.stages, self.asked = {stage.name for stage in stages}, set()

    def __missing__(self, key):
        stage, _, metric = key.rpartition("/")
        assert stage in self.stages, f"{key}: no such stage"
        self.asked.add((stage, metric))
        return np.random.default_rng(zlib.crc32(key.encode())).uniform(0.5, 1.0, (SEEDS, STEPS))


def everything_read(name):
    """The stages of the smoke tier, and (stage, metric) of all that claims, panels, sections and sweeps read."""
    experiment = importlib.import_module(f"jaxpt.experiments.{name}").EXPERIMENT
    config = experiment.tiers["smoke"].config
    stages = topological(experiment.stages(config, {}))
    curves = Curves(stages)
    for claim in experiment.claims:
        for what in (claim.estimand, claim.control):
            values = what(curves)
            assert values.shape == (SEEDS,) and np.isfinite(values).all(), claim.name
    derived = experiment.derived(config, curves) if experiment.derived else {}
    curves.update({f"derived/{key}": values for key, values in derived.items()})
    for panel in experiment.panels:
        for key in (*panel.series.values(), *(panel.x or {}).values()):
            assert curves[key].shape == (SEEDS, STEPS)
    for table in experiment.sweep:
        for field, (_, metric) in table.items():
            assert hasattr(config, field)
            curves[metric]
    assert experiment.sections(config, curves).startswith("## ")
    return stages, curves.asked


@pytest.mark.parametrize("name", NAMES)
def test_claims_panels_and_sweeps_read_stages_that_exist(name):
    stages, asked = everything_read(name)
    assert {stage for stage, _ in asked} <= {stage.name for stage in stages}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_can_be_traced_and_measures_what_is_read(name):
    stages, asked = everything_read(name)
    metrics = {}
    for stage in stages:
        known = stage.make, repr(stage.config)
        if known not in metrics:
            program = stage.make(stage.config)
            hyper = {key: jnp.float32(x) for key, x in program.hyper.items()}
            state = jax.eval_shape(program.init, jax.random.key(0), hyper)
            metrics[known] = set(program.hyper), set(jax.eval_shape(program.step, state)[1])
        leaves, measured = metrics[known]
        assert set(stage.hyper) <= leaves, stage.name
        assert {metric for where, metric in asked if where == stage.name} <= measured, stage.name


def test_mixtures_cost_what_the_dense_twin_costs_but_for_the_router():
    cfg = moe_granularity.EXPERIMENT.tiers["cpu"].config
    models = cfg.models()
    shapes = {name: jax.eval_shape(make_model(model).init, jax.random.key(0)) for name, model in models.items()}
    dense = active_flops(models["dense"], 2, cfg.window)
    for name, model in models.items():
        if model.moe is None:
            continue
        routed = 2 * 2 * cfg.window * model.n_layers * cfg.d_model * model.moe.experts * (model.moe.choice == "token")
        assert active_flops(model, 2, cfg.window) - routed == dense, name
        routers = model.n_layers * cfg.d_model * model.moe.experts * (model.moe.choice == "token")
        assert param_counts(shapes[name])["total"] - routers == param_counts(shapes["wide"])["total"], name
        assert active_params(shapes[name], model) - routers == param_counts(shapes["dense"])["total"], name


def test_adapters_on_attention_and_feed_forward_have_as_many_parameters_as_on_all():
    cfg = lora_laws.EXPERIMENT.tiers["cpu"].config
    base = jax.eval_shape(make_model(cfg.model()).init, jax.random.key(0))

    def size(arm):
        lora = cfg.lora(arm)
        adapters = jax.eval_shape(lambda key, p: init_lora(key, p, lora.rank, targets=lora.targets), jax.random.key(0), base)
        return sum(x.size for x in jax.tree.leaves(adapters))

    for arm in ("attention", "mlp"):
        assert abs(size(arm) / size("all") - 1) < 0.03
    assert cfg.lora("one").rank == 1 and cfg.lora("full") is None


def test_speed_is_the_log_of_a_ratio_of_updates():
    curve = lambda values: np.array([values], float)  # noqa: E731
    curves = {
        "adamw/held": curve([np.nan, 0.9, np.nan, 0.5]), "muon/held": curve([np.nan, 0.4, np.nan, 0.3]),
        "muon_qk/held": curve([np.nan, 0.9, np.nan, 0.8]),
    }
    np.testing.assert_allclose(muon_qknorm.speed(curves, "muon"), np.log(2))
    assert muon_qknorm.speed(curves, "muon_qk") == muon_qknorm.speed(curves, "adamw") == 0


@pytest.mark.parametrize("name, field, value, sentence", [
    ("moe_balance", "updates", 30, "--updates 30: expected a multiple of 20"),
    ("moe_balance", "top_k", 9, "MoeConfig.top_k is 9: expected at most experts"),
    ("moe_granularity", "d_ff", 12, "--d-ff 12: expected a multiple of 8"),
    ("expert_dropout", "experts", 2, "--experts 2: expected a number from 3"),
    ("moe_rl_routing", "samples", 1, "--samples 1: expected at least 2"),
    ("muon_qknorm", "n_heads", 5, "n_heads is 5: expected a divisor of d_model"),
    ("lora_laws", "rank", 0, "--rank 0: expected at least 1"),
    ("depth_and_loops", "p", 6, "--p 6 --generators 4: p is 6"),
    ("gspo_moe", "minibatches", 5, "--minibatches 5: expected a divisor"),
])
def test_bad_values_are_told_in_the_command_line_s_words(name, field, value, sentence):
    config = importlib.import_module(f"jaxpt.experiments.{name}").EXPERIMENT.tiers["cpu"].config
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(config, **{field: value})
