"""`jaxpt fit FILE --law chinchilla`: a certified fit with intervals. Imports neither jax nor SciPy."""

import os
from collections.abc import Sequence

from jaxpt.cli.options import Option, help_text, no_more, split, whole
from jaxpt.lab.errors import UserError, expected


def positive(text: str) -> float:
    from jaxpt.lab.tables import positive as read

    try:
        return read(text)
    except ValueError:
        raise ValueError("a number above 0 is expected, like 6, 1e-3 or 70M") from None


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


def one_of(*choices: str):
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(expected(text, choices))
        return text
    return read


OPTIONS = {
    "--law": Option(one_of("chinchilla"), "chinchilla", "chinchilla: L = E + A / N^alpha + B / D^beta"),
    "--n": Option(str, None, "column of parameters; by default N, params, parameters, model size, ..."),
    "--d": Option(str, None, "column of training tokens; by default D, tokens, train_tokens, ..."),
    "--c": Option(str, None, "column of training FLOPs; by default C, flops, compute, training flop, ..."),
    "--loss": Option(str, None, "column of the loss in nats; by default loss, val_loss, eval_loss, ..."),
    "--d-from": Option(positive, None, "6: take D = C / (6 N) instead of a column"),
    "--drop": Option(drop_rule, None, "highest:5 or lowest:5: leave out that many losses, and say so"),
    "--weight": Option(str, None, "column of weights of the residuals"),
    "--cluster": Option(str, None, "column of runs that belong together (N: equal sizes); resamples groups"),
    "--skip-bad": Option(None, False, "leave out rows that cannot be read, and name them; else an error"),
    "--objective": Option(one_of("huber", "lad", "lsq"), "huber", "of log residuals: huber (default), lad, lsq"),
    "--delta": Option(positive, 1e-3, "Huber's threshold on the log residual (1e-3)"),
    "--bootstrap": Option(count, 4000, "number of refits (4000); 0 for none"),
    "--resample": Option(one_of("case", "cluster", "residual", "wild"), None,
                         "case (the default), cluster (with --cluster), residual or wild"),
    "--seed": Option(count, 0, "seed of the refits (0)"),
    "--budget": Option(positive, None, "FLOPs: show the best N, D and the loss to expect"),
    "--flop-constant": Option(positive, None, "k in C = k N D (the value of --d-from, or 6)"),
    "--figure": Option(figure_name, None, "write data, curves and residuals to a .png, .pdf or .svg"),
    "--json": Option(None, False, "for machines, with all digits"),
    "--markdown": Option(None, False, "as Markdown"),
    "--help": Option(None, False, "this text"),
}
USAGE = "jaxpt fit FILE [--law chinchilla] [options]"
WHAT = ("Fits a scaling law to a table of runs and says how sure it can be.\n"
        "FILE is CSV (comma, semicolon, tab or |: the one the header has most of), JSON lines, or Parquet\n"
        "(with the extra jaxpt[parquet]); numbers may be written 70M, 1.4T or 6e19.")


def fit_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values["--help"]:
        print(help_text(USAGE, WHAT, OPTIONS))
        return 0
    if not rest or rest[0].startswith("-"):
        no_more(rest, OPTIONS)
        raise UserError(f"FILE is missing: {USAGE} is expected")
    no_more(rest[1:], OPTIONS)
    resample = values["--resample"] or ("cluster" if values["--cluster"] else "case")
    if resample == "cluster" and values["--cluster"] is None:
        raise UserError("--resample cluster: --cluster COLUMN is needed to know which runs belong together")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are small: threads would only spin
    print(_fit(rest[0], values, resample))
    return 0


def _fit(path: str, values: dict, resample: str) -> str:
    from jaxpt.lab.fit_report import as_json, as_markdown, as_text, record
    from jaxpt.lab.points import read_points
    from jaxpt.lab.tables import read_table
    from jaxpt.scaling.study import study

    columns = {name: values[f"--{name}"] for name in ("n", "d", "c", "loss", "weight", "cluster")}
    points = read_points(read_table(path), **columns, d_from=values["--d-from"], drop=values["--drop"],
                         skip_bad=values["--skip-bad"])
    result = study(
        points.N, points.D, points.loss, weight=points.weight, cluster=points.cluster, resample=resample,
        objective=values["--objective"], delta=values["--delta"], bootstrap=values["--bootstrap"],
        seed=values["--seed"], budget=values["--budget"],
        flop=values["--flop-constant"] or values["--d-from"] or 6.0)
    if values["--figure"] is not None:
        from jaxpt.lab.fit_figure import save

        save(values["--figure"], result, points)
    entry = record(result, points, values["--seed"])
    write = as_json if values["--json"] else as_markdown if values["--markdown"] else as_text
    return write(entry)
