"""Bytes and FLOPs of a step before it is run: exact parts against arrays that lie on devices, the rest against XLA."""

import json

import jax
import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.models import LoraConfig, ModelConfig, MoeConfig
from jaxpt.models.layouts import json_of
from jaxpt.train import memory, parallel
from jaxpt.train.optim import OptimConfig


def model(**more):
    return ModelConfig(**{"vocab": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, **more})


@pytest.mark.parametrize("cfg, sizes", [
    (memory.StepConfig(model=model(), batch=8, length=16), {}),
    (memory.StepConfig(model=model(scan=True), batch=8, length=16, optim=OptimConfig(weights="bfloat16")), {"data": 8}),
    (memory.StepConfig(model=model(moe=MoeConfig(experts=4)), batch=8, length=16), {"data": 2, "expert": 4}),
    (memory.StepConfig(model=model(tied=False), method="grpo", batch=32, length=16, group=4), {"data": 4, "tensor": 2}),
    (memory.StepConfig(model=model(lora=LoraConfig(rank=4)), method="ppo", batch=16, length=16), {"data": 2, "sequence": 2}),
    (memory.StepConfig(model=model(), batch=8, length=16, optim=OptimConfig(method="muon")), {"data": 2, "tensor": 4}),
], ids=["one", "masters", "experts", "grpo", "adapters", "muon"])
def test_what_rests_is_what_devices_hold(cfg, sizes):
    """The bytes that the first device really holds of such a state, part by part."""
    mesh = parallel.make_mesh(**{"data": 1, **sizes})
    make, program_cfg = cfg.program(memory.row_shards(mesh.shape))
    state = memory.abstract_state(make(program_cfg))
    state = {name: x for name, x in state.items() if name in memory.PARTS}
    held = parallel.place(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state), mesh)
    found = {}
    for name, tree in held.items():
        here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        found[memory.PARTS[name]] = found.get(memory.PARTS[name], 0) + here
    parts = memory.resident(cfg, dict(mesh.shape))
    assert found == {name: parts[name] for name in found}
    assert parts["gradients"] <= parts["parameters"] + parts.get("critic", 0)
    assert (parts["cache"] > 0) == (cfg.method != "sft")


def test_parts_by_hand():
    cfg = memory.StepConfig(model=model(), batch=32, length=32, group=4, method="grpo")
    parts = memory.resident(cfg, {"data": 4, "tensor": 2, "expert": 1, "sequence": 1})
    layer = 64 * 3 * 64 + 64 * 64 + 3 * 64 * model().ff
    matrices, scales = 256 * 64 + 2 * layer, 5 * 64
    assert parts["parameters"] == parts["gradients"] == parts["reference"] == 4 * (matrices // 8 + scales)
    assert parts["optimizer"] == 2 * parts["parameters"] + 2 * 4  # Adam's and the schedule's counts
    assert parts["cache"] == 4 * 2 * 2 * 32 * 32 * 64 // 8  # keys and values, layers, rows, slots, heads times width
    assert memory.parameters(cfg) == matrices + scales
    masters = memory.StepConfig(model=model(), batch=8, length=16, optim=OptimConfig(weights="bfloat16"))
    rounded = memory.resident(masters, dict.fromkeys(("data", "tensor", "expert", "sequence"), 1))
    assert rounded["parameters"] == 2 * matrices + 4 * scales
    assert rounded["optimizer"] == 3 * 4 * (matrices + scales) + 2 * 4


def test_steps_of_more_flops_than_31_bits_are_counted():
    cfg = memory.StepConfig(model=model(d_model=1024), batch=64, length=64)
    make, program_cfg = cfg.program()
    program = make(program_cfg)
    assert memory.step_flops(cfg) > 2**31
    assert jax.eval_shape(program.step, memory.abstract_state(program))[1]["flops"].dtype == "float32"


COMPILED = {  # none is among those that the estimate's constants were fitted to; "fsdp remat" has corrected its form
    "deep": (memory.StepConfig(model=model(d_model=96, n_layers=3, n_heads=6), batch=8, length=48), {}),
    "long": (memory.StepConfig(model=model(n_heads=2), batch=4, length=192), {}),
    "vocabulary": (memory.StepConfig(model=model(vocab=2048, n_layers=1), batch=8, length=40), {}),
    "fsdp": (memory.StepConfig(model=model(d_model=96), batch=32, length=32), {"data": 4}),
    "tensor": (memory.StepConfig(model=model(d_model=96), batch=16, length=48), {"data": 2, "tensor": 2}),
    "grpo": (memory.StepConfig(model=model(), method="grpo", batch=32, length=48, group=4), {"data": 2}),
    "remat": (memory.StepConfig(model=model(n_layers=6, scan=True, remat=True), batch=16, length=48), {}),
    "fsdp remat": (memory.StepConfig(model=model(d_model=96, n_layers=6, scan=True, remat=True), batch=16, length=32), {"data": 8}),
    "shares": (memory.StepConfig(model=model(n_heads=8, dots="bfloat16"), batch=32, length=64, micro=8), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_the_estimate_is_within_30_percent_of_the_compiler_and_arguments_are_exact(name):
    cfg, sizes = COMPILED[name]
    mesh = parallel.make_mesh(**{"data": 1, **sizes})
    sizes = dict(mesh.shape)
    parts, plan = memory.resident(cfg, sizes), memory.compiled(cfg, mesh)
    rests = sum(parts.values()) - parts["gradients"] - parts["cache"]
    np.testing.assert_allclose(plan.argument_size_in_bytes, rests, atol=1024)  # scalars are padded
    shared = max(parts["gradients"], parts["cache"])
    estimated, found = memory.estimate(cfg, sizes) - shared, plan.temp_size_in_bytes - shared
    assert 0.7 < estimated / found < 1.3, (estimated, found)


def say(capsys, *words):
    code = main(["memory", *words])
    return code, *capsys.readouterr()


SMALL = ["--vocab", "64", "--d-model", "32", "--n-heads", "2", "--n-layers", "1", "--batch", "8", "--length", "32"]


def test_the_command_adds_up(capsys):
    code, out, _ = say(capsys, *SMALL, "--mesh", "data=4,tensor=2", "--json")
    record = json.loads(out)
    assert code == 0 and record["devices"] == 8 and record["activations"] == "compiled"
    assert record["total"] == sum(record["bytes"].values())
    assert record["note"] == "" and record["bytes"]["activations"] > 8 * 32 * 32 * 4 // 8  # more than one hidden state
    fast = json.loads(say(capsys, *SMALL, "--mesh", "data=4,tensor=2", "--fast", "--json")[1])
    assert fast["activations"] == "estimated" and fast["flops"] == record["flops"]
    assert {k: v for k, v in fast["bytes"].items() if k != "activations"} == {
        k: v for k, v in record["bytes"].items() if k != "activations"
    }


def test_the_table_is_readable(capsys):
    code, out, _ = say(capsys, *SMALL, "--fast", "--method", "grpo", "--lora", "4", "--moe.experts", "4")
    assert code == 0
    for word in ("parameters", "gradients", "optimizer", "reference", "key/value cache", "activations", "total", "FLOPs"):
        assert word in out


def test_a_folder_stands_for_its_model(capsys, tmp_path):
    """Its config.json alone: the weights are not looked at, and fields change what it says."""
    cfg = model()
    config = json_of(cfg, 64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    numbers = ["--batch", "8", "--length", "16", "--fast", "--json"]
    flags = [word for name in ("vocab", "d_model", "n_layers", "n_heads", "d_ff")
             for word in (f"--{name.replace('_', '-')}", str(cfg.ff if name == "d_ff" else getattr(cfg, name)))]
    folder = say(capsys, "--checkpoint", str(tmp_path), *numbers)
    assert folder[0] == 0 and folder == say(capsys, *flags, *numbers)
    deeper = say(capsys, "--checkpoint", str(tmp_path), "--n-layers", "3", *numbers)
    assert json.loads(deeper[1])["parameters"] > json.loads(folder[1])["parameters"]


def test_help_lists_every_field_of_the_model(capsys):
    code, out, _ = say(capsys, "--help")
    assert code == 0
    for name in {**vars(model()), **{f"moe.{name}": 0 for name in vars(MoeConfig())}}:
        assert name in ("moe", "lora") or f"  --{name.replace('_', '-')} " in out


@pytest.mark.parametrize("words, sentence", [
    (["--mesh", "data=3"], "8 rows do not divide over 3 shards"),
    (["--mesh", "data=4", "--micro", "2"], "2 rows do not divide over 4 shards"),
    (["--mesh", "data=2", "--method", "grpo"], "1 rows do not divide over 2 shards"),
    (["--mesh", "data=4,tensr=2"], "--mesh tensr=2: did you mean tensor?"),
    (["--mesh", "data"], "NAME=VALUE is expected"),
    (["--mesh", "data=0"], "a size of at least 1 is expected"),
    (["--mesh", "tensor=3"], "tensor=3 does not divide 64 of params/embed [64, 32], expected a divisor"),
    (["--method", "grp"], "unknown objective 'grp'; nearest: 'grpo'"),
    (["--method", "grpo", "--group", "3"], "batch: got 8, expected a multiple of group = 3"),
    (["--lora", "0"], "LoraConfig.rank is 0"),
    (["--n-heads", "3"], "ModelConfig.n_heads is 3: expected a divisor of d_model (32)"),
    (["--moe.experts", "1"], "MoeConfig.experts is 1: expected at least 2"),
    (["--d-modl", "3"], "option --d-modl is unknown: did you mean --d-model?"),
    (["--batch", "x"], "--batch x: a whole number is expected"),
    (["--length", "1"], "prompt: got 1, expected at least 1 and less than length = 1"),
    (["--checkpoint", "nowhere"], "expected the folder of a model"),
    (["--weights", "int8"], "weights: got 'int8', expected one of float32, bfloat16"),
])
def test_errors_are_one_sentence(capsys, words, sentence):
    code, out, err = say(capsys, *SMALL, "--fast", *words)
    assert code == 2 and out == "" and sentence in err and len(err.splitlines()) == 1
