"""What is wrong with an experiment, or with what is asked of it, is one sentence, told before the computing where that can be;
and what tells stages apart."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

import toy_experiment
from jaxpt.lab.errors import RunFailed, UserError
from jaxpt.lab.experiment import Experiment, Panel, Stage, asked, load, topological
from jaxpt.lab.identity import claim_records, digest, program_identity, stage_identities
from jaxpt.lab.merge import rehearse
from jaxpt.lab.run import run
from jaxpt.train.program import Program
from running import workers_of

TOY = str(Path(toy_experiment.__file__).resolve())
pytestmark = pytest.mark.usefixtures("compile_cache")


def test_a_broken_program_is_told_in_one_line(tmp_path):
    with pytest.raises(RunFailed, match="RuntimeError: the program is broken") as caught:
        run(TOY, "smoke", out=tmp_path, overrides={"fail": "program"})
    (error,) = tmp_path.glob("*/*/error.txt")
    assert str(error) in str(caught.value) and "make_descent" in error.read_text()
    assert not workers_of(tmp_path)


def test_a_killed_worker_is_told(tmp_path):
    with pytest.raises(RunFailed, match="killed by SIGKILL.*--resume"):
        run(TOY, "smoke", out=tmp_path, overrides={"fail": "memory"})


def test_a_broken_section_is_told_in_one_line(tmp_path):
    """What data may excuse passes the rehearsal; where the real curves do not excuse it, it is blamed."""
    own = tmp_path / "broken_toy.py"
    own.write_text(Path(TOY).read_text().replace('f"## Remarks', 'f"{1 / 0}'))
    with pytest.raises(RunFailed, match="ZeroDivisionError.*error.txt"):
        run(str(own), "smoke", seeds=1, out=tmp_path, overrides={"steps": 2})
    (folder,) = tmp_path.glob("broken_toy/*")
    assert "1 / 0" in (folder / "error.txt").read_text() and not (folder / "report.md").exists()


def test_misspelt_curves_are_found_before_the_computing(tmp_path):
    own = tmp_path / "misspelt_toy.py"
    text = Path(TOY).read_text()
    own.write_text(text.replace('gain("slow/loss", "slow/loss")', 'gain("slow/loss", "slow/los")'))
    with pytest.raises(UserError, match="curve 'slow/los' is unknown: did you mean slow/loss"):
        run(str(own), "smoke", out=tmp_path, overrides={"steps": 100000})


def test_rehearsal_forgives_what_data_may_excuse():
    experiment = toy_experiment.EXPERIMENT
    stages = topological(experiment.stages(toy_experiment.Config(), {}))
    shapes = {s.name: {"loss": (), "eval": (), "x": (2,)} for s in stages}
    rehearse(experiment, toy_experiment.Config(), stages, 2, {}, shapes)
    wide = Experiment(experiment.tiers, stages, [], [Panel("wide", {"x": "slow/x"}, "y")])
    with pytest.raises(UserError, match="more than one number per step"):
        rehearse(wide, None, stages, 2, {}, shapes)


def test_programs_of_one_factory_are_told_apart():
    def maker(speed):
        return lambda config: Program(
            lambda key, hyper, start=None: {"x": jnp.float32(0)},
            lambda state: ({"x": state["x"] + speed}, {"x": state["x"] + speed}), {}, lambda state: state,
        )

    one, ten = (Stage(name, maker(speed), None, 4) for name, speed in (("one", 1.0), ("ten", 10.0)))
    assert program_identity(one) != program_identity(ten)
    assert program_identity(one) == program_identity(Stage("again", maker(1.0), None, 4))


def test_tuning_seeds_and_evidence_do_not_share_a_folder(tmp_path):
    run(TOY, "smoke", seeds=1, out=tmp_path, overrides={"steps": 2})
    with pytest.raises(UserError, match="both sides of 10000"):
        run(TOY, "smoke", seeds=1, seed0=10000, out=tmp_path, overrides={"steps": 2}, resume=True)


@pytest.mark.parametrize("arguments, sentence", [
    ({"seeds": 0}, "--seeds 0: a whole number of at least 1"),
    ({"seeds": 2.5}, "--seeds 2.5: a whole number"),
    ({"seed0": -1}, "--seed0 -1"),
    ({"seed0": 9999, "seeds": 2}, "are for tuning"),
    ({"tier": "smok"}, "did you mean smoke"),
    ({"launcher": "slum"}, "--launcher 'slum' is unknown: did you mean slurm"),
    ({"address": "a:1"}, "--address a:1: expected with --launcher ray or slurm"),
    ({"overrides": {"step": 3}}, "did you mean steps"),
    ({"overrides": {"steps": 0}}, "steps 0"),
    ({"out": "/dev/null"}, "--out"),
])
def test_bad_arguments(tmp_path, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        run(TOY, **{"tier": "smoke", "out": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


def test_loading(tmp_path):
    assert load(TOY).doc.startswith("Does a larger step")
    for text, sentence in [("x = 1", "has no EXPERIMENT"), ("import nowhere_at_all", "ModuleNotFoundError"),
                           ("def", "not a Python file")]:
        path = tmp_path / f"{digest(text)[:8]}.py"
        path.write_text(text)
        with pytest.raises(UserError, match=sentence):
            load(str(path))
    with pytest.raises(UserError, match="no such file"):
        load("nowhere.py")
    with pytest.raises(UserError, match="unknown"):
        load("no_such_experiment")


def stage(name, after=None, **more):
    return Stage(name, toy_experiment.make_descent, toy_experiment.Descent(2, 0.1), 3, after, **more)


def test_stages_form_a_forest():
    names = [s.name for s in topological([stage("c", "b"), stage("b", "a"), stage("a")])]
    assert names == ["a", "b", "c"]
    for stages, sentence in [
        ([], "at least one"), ([stage("a"), stage("a")], "a name of its own"), ([stage("a/b")], "a name is"),
        ([stage("base"), stage("b", "bas")], "did you mean base"),
        ([stage("a", "b"), stage("b", "a")], "circle"),
    ]:
        with pytest.raises(UserError, match=sentence):
            topological(stages)


def test_identities_hold_what_changes_results():
    def ids(*stages):
        return stage_identities(topological(stages))

    base = ids(stage("a"), stage("b", "a"))
    assert ids(stage("a", chunk=1), stage("b", "a")) == base  # chunks change nothing
    changed = ids(stage("a", hyper={"lr": 0.1}), stage("b", "a"))
    assert changed["a"] != base["a"] and changed["b"] != base["b"]
    assert ids(stage("a"), stage("b", "a", stream="s"))["b"] != base["b"]
    assert program_identity(stage("a")) == program_identity(stage("b", hyper={"lr": 1.0}))
    one, two = claim_records(toy_experiment.EXPERIMENT.claims)[0], toy_experiment.EXPERIMENT.claims[0]
    assert one["estimand"] != one["control"]  # one text, other captured names
    assert digest(claim_records([two])) == digest([one])


def test_claims_and_panels_may_follow_from_the_config():
    given = toy_experiment.EXPERIMENT
    following = dataclasses.replace(
        given, claims=lambda cfg: list(given.claims) * cfg.size, panels=lambda cfg: given.panels[: cfg.size]
    )
    one = asked(following, toy_experiment.Config(size=1))
    assert one.claims == list(given.claims) and one.panels == given.panels[:1]
    assert len(asked(following, toy_experiment.Config(size=3)).claims) == 3 and asked(given, toy_experiment.Config()) == given
