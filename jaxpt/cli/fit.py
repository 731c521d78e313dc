"""`jaxpt fit FILE --law NAME`: a certified fit with intervals. Chinchilla's law needs neither jax nor SciPy."""

import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jaxpt.cli import ask
from jaxpt.cli.options import Option, help_text, no_more, one_of, pairs, positive, split, whole
from jaxpt.lab.errors import UserError, expected


def count(text: str) -> int:
    value = whole(text)
    if not 0 <= value <= 1_000_000:
        raise ValueError("a whole number from 0 to 1000000 is expected")
    return value


def drop_rule(text: str) -> tuple[str, int]:
    which, _, number = text.partition(":")
    if which not in ("highest", "lowest") or not number.isdigit():
        raise ValueError("highest:K or lowest:K is expected, like highest:5")
    return which, int(number)


def figure_name(text: str) -> str:
    if not text.lower().endswith((".png", ".pdf", ".svg")):
        raise ValueError("a name that ends in .png, .pdf or .svg is expected")
    return text


def own_ladder() -> str:
    """What scripts/ship_ladder.py made."""
    return str(files("jaxpt.experiments") / "data" / "scaling_ladder.csv")


def any_number(text: str) -> float:
    from jaxpt.lab.tables import number

    return number(text)


OPTIONS = {
    "--law": Option(str, "chinchilla", "a name that `jaxpt list laws` shows, or file.py:function (see below)"),
    "--x": Option(pairs(str), (), "U=unique,accuracy=acc: columns of what the law takes, by its names"),
    "--n": Option(str, None, "column of parameters; by default N, params, parameters, model size, ..."),
    "--d": Option(str, None, "column of training tokens; by default D, tokens, train_tokens, ..."),
    "--c": Option(str, None, "column of training FLOPs; by default C, flops, compute, training flop, ..."),
    "--loss": Option(str, None, "column of the loss in nats; by default loss, val_loss, eval_loss, ..."),
    "--d-from": Option(positive, None, "6: take D = C / (6 N) instead of a column"),
    "--drop": Option(drop_rule, None, "highest:5 or lowest:5: leave out that many losses, and say so"),
    "--weight": Option(str, None, "column of weights of the residuals"),
    "--cluster": Option(str, None, "column of runs that belong together (N: equal sizes); resamples groups"),
    "--skip-bad": Option(None, False, "leave out rows that cannot be read, and name them; else an error"),
    "--fix": Option(pairs(any_number), (), "E=1.69: parameters that are given"),
    "--objective": Option(one_of("huber", "lad", "lsq", "student", "asymmetric"), "huber",
                          "of residuals: huber (the default), lad, lsq, student, asymmetric"),
    "--delta": Option(positive, 1e-3, "Huber's threshold, Student's scale, on the (log) residual (1e-3)"),
    "--bootstrap": Option(count, None, "number of refits (4000; fewer without a closed form); 0 for none"),
    "--resample": Option(one_of("case", "cluster", "residual", "wild"), None,
                         "case (the default), cluster (with --cluster), residual or wild"),
    "--seed": Option(count, 0, "seed of the refits (0)"),
    "--at": Option(pairs(any_number), (), "N=7B,D=2T: predict a run"),
    "--budget": Option(positive, None, "FLOPs: show the best N, D and the loss to expect (chinchilla)"),
    "--isoflop": Option(None, False, "approaches 1, 2 and 3 to the best size side by side; N* at --budget"),
    "--next": Option(count, None, "K: the K runs to buy next that tell most about --target"),
    "--spend": Option(positive, None, "FLOPs that they may cost together (a tenth of what the table's runs cost)"),
    "--target": Option(one_of("a", "loss", "N"), None,
                       "of --next: a of N* ~ C^a, or loss* or N* at --budget (loss with --budget, else a)"),
    "--flop-constant": Option(positive, None, "k in C = k N D (the value of --d-from, or 6)"),
    **ask.OPTIONS,
    "--figure": Option(figure_name, None, "draw the report (also of --isoflop and --next) to a .png, .pdf or .svg"),
    "--json": Option(None, False, "for machines, with all digits"),
    "--markdown": Option(None, False, "as Markdown"),
    "--help": Option(None, False, "this text"),
}
USAGE = "jaxpt fit [FILE] [--law NAME] [options]"
WHAT = ("Fits a scaling law to a table of runs and says how sure it can be.\n"
        "FILE is CSV (comma, semicolon, tab or |: the one the header has most of), JSON lines, or Parquet\n"
        "(with the extra jaxpt[parquet]), or a folder of runs of `jaxpt run`: a row for each stage and seed, with its\n"
        "tokens, FLOPs and last held-out loss. Numbers may be written 70M, 1.4T or 6e19. Without FILE it is jaxpt's\n"
        "own ladder: what `jaxpt run scaling_ladder` measured on the source of Python's standard library.\n"
        "A law of your own is a function like\n"
        "    def mine(N, D, *, A=400.0, alpha=0.3, E=1.7): return E + A / N**alpha\n"
        "of columns and, after the star, parameters with values to begin near; with jax.numpy where it needs more\n"
        "than operators. A parameter whose default is 0 or below may have either sign.")


def fit_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values["--help"]:
        print(help_text(USAGE, WHAT, OPTIONS))
        return 0
    if rest and rest[0].startswith("-"):
        no_more(rest, OPTIONS)
    no_more(rest[1:], OPTIONS)
    file = rest[0] if rest else own_ladder()
    resample = values["--resample"] or ("cluster" if values["--cluster"] else "case")
    if resample == "cluster" and values["--cluster"] is None:
        raise UserError("--resample cluster: --cluster COLUMN is needed to know which runs belong together")
    if used := ask.given(values):
        _chinchilla_only(values, used[0])
        if values["--isoflop"] or values["--next"] is not None:
            raise UserError(f"{used[0]}: --isoflop and --next are reports of their own: ask for one")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are small: threads would only spin
    if values["--isoflop"] or values["--next"] is not None:
        print(_approaches(file, values) if values["--isoflop"] else _plan(file, values))
        return 0
    closed = values["--law"] == "chinchilla" and not values["--fix"] and not values["--at"]
    print(_closed_form(file, values, resample) if closed else _any_law(file, values, resample))
    return 0


def _points(path: str, values: dict, wanted: Any) -> Any:
    from jaxpt.lab.points import read_points
    from jaxpt.lab.tables import read_table

    flags = {"N": "--n", "D": "--d", "C": "--c", "loss": "--loss", "weight": "--weight"}
    columns = {name: values[flag] for name, flag in flags.items()}
    shape = None if values["--count"] in (None, "table") else ask.shape_columns(values)[0]
    points = read_points(read_table(path), wanted, columns=columns | dict(values["--x"]), cluster=values["--cluster"],
                       d_from=values["--d-from"], drop=values["--drop"], skip_bad=values["--skip-bad"],
                       shape=shape)
    own = ["no file was named: these are jaxpt's own runs, of `jaxpt run scaling_ladder`"] if path == own_ladder() else []
    return points._replace(notes=[*own, *points.notes])


def _closed_form(path: str, values: dict, resample: str) -> str:
    from jaxpt.lab.points import Wanted
    from jaxpt.scaling.study import study

    budget = ask.budget(values)
    ask.shape_columns(values)
    points = _points(path, values, Wanted())
    asked = ask.asked(values, points, _flop(values), budget)
    result = study(
        points.N, points.D, points.loss, weight=points.weight, cluster=points.cluster, resample=resample,
        objective=values["--objective"], delta=values["--delta"], bootstrap=_refits(values, 4000),
        seed=values["--seed"], budget=budget, flop=_flop(values))
    answers = []
    if ask.given(values):
        from jaxpt.scaling.questions import answers as answered

        answers = answered(result.fit.params, result.samples, asked)
    return _written(result, points, values, answers)


def _chinchilla_only(values: dict, flag: str) -> None:
    if values["--law"] != "chinchilla" or values["--fix"] or values["--at"]:
        raise UserError(f"{flag}: only for --law chinchilla without --fix and --at")
    if values["--isoflop"] and values["--next"] is not None:
        raise UserError("--isoflop and --next are two reports: ask for one")


def _flop(values: dict) -> float:
    return values["--flop-constant"] or values["--d-from"] or 6.0


def _approaches(path: str, values: dict) -> str:
    from jaxpt.lab import isoflop_report
    from jaxpt.lab.points import Wanted
    from jaxpt.scaling.approaches import compare

    _chinchilla_only(values, "--isoflop")
    points = _points(path, values, Wanted())
    result = compare(points.N, points.D, points.loss, C=points.C, weight=points.weight, objective=values["--objective"],
                     delta=values["--delta"], flop=_flop(values), bootstrap=_refits(values, 400),
                     seed=values["--seed"], target=values["--budget"])
    if values["--figure"] is not None:
        from jaxpt.lab.fit_figure import write
        from jaxpt.lab.isoflop_figure import draw

        write(values["--figure"], draw(result, points))
    return _reported(isoflop_report, isoflop_report.record(result, points, values["--seed"]), values)


def _plan(path: str, values: dict) -> str:
    from jaxpt.lab import plan_report
    from jaxpt.lab.points import Wanted

    _chinchilla_only(values, "--next")
    target = values["--target"] or ("loss" if values["--budget"] else "a")
    if target != "a" and values["--budget"] is None:
        raise UserError(f"--target {target}: --budget FLOPS is needed to say of which budget")
    points = _points(path, values, Wanted())
    entry = plan_report.record(points, values["--next"], target, values["--budget"], values["--spend"], _flop(values),
                               _refits(values, 1000), values["--seed"], values["--objective"], values["--delta"])
    if values["--figure"] is not None:
        from jaxpt.lab.fit_figure import write
        from jaxpt.lab.plan_figure import draw

        write(values["--figure"], draw(entry, points))
    return _reported(plan_report, entry, values)


def _reported(report: Any, entry: dict[str, Any], values: dict) -> str:
    """report: what makes sentences and tables of the entry."""
    from jaxpt.lab.fit_report import as_json, marked, plain

    if values["--json"]:
        return as_json(entry)
    write = marked if values["--markdown"] else plain
    return write(report.sentences(entry), report.tables(entry), entry["warnings"])


def _any_law(path: str, values: dict, resample: str) -> str:
    from jaxpt.lab.law_file import find_law
    from jaxpt.lab.points import Wanted

    law = find_law(values["--law"])
    fixed, at = dict(values["--fix"]), dict(values["--at"])
    for name, value in fixed.items():
        if name not in law.names:
            raise UserError(f"--fix {name}={value:g}: the law has no such parameter: {expected(name, law.names)}")
        if name not in law.real and value <= 0:
            raise UserError(f"--fix {name}={value:g}: {name} is above 0")
    if at and set(at) != set(law.inputs):
        raise UserError(f"--at: a value for each of {', '.join(law.inputs)} is expected, got {', '.join(at)}")
    for flag in ("--budget", "--flop-constant"):
        if values[flag] is not None:
            raise UserError(f"{flag} {values[flag]:g}: only --law chinchilla without --fix and --at has a frontier")
    wanted = Wanted(law.inputs, law.output, law.residual, law.nonnegative, len(law.names) - len(fixed))
    points = _points(path, values, wanted)
    # A higher level of optimisation takes twice the time to compile and saves nothing here.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    from jaxpt.scaling import general
    from jaxpt.scaling.study import study_law

    try:
        data = general.prepare(law, points.x, points.y, points.weight, fixed)
        found = general.fit(data, values["--objective"], values["--delta"])
    except ValueError as error:
        raise UserError(f"--law {values['--law']}: {error}") from None
    except Exception as error:
        if ":" not in values["--law"]:
            raise
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(f"--law {values['--law']}: a law is written with operators and with jax.numpy; "
                        f"{words}") from None
    result = study_law(found, cluster=points.cluster, resample=resample, bootstrap=values["--bootstrap"],
                       seed=values["--seed"], at=at or None)
    return _written(result, points, values)


def _refits(values: dict, default: int) -> int:
    return default if values["--bootstrap"] is None else values["--bootstrap"]


def _written(result: Any, points: Any, values: dict, answers: Sequence[Any] = ()) -> str:
    from jaxpt.lab.fit_report import as_json, as_markdown, as_text, record

    if values["--figure"] is not None:
        from jaxpt.lab.fit_figure import save

        save(values["--figure"], result, points)
    entry = record(result, points, values["--seed"], answers)
    write = as_json if values["--json"] else as_markdown if values["--markdown"] else as_text
    return write(entry)
