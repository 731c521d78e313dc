"""Property-based verification of loss mathematics: anybody's function, in JAX, NumPy or PyTorch, against a catalogue
of laws, with a small counterexample where one is broken.

    from jaxpt.verify import check, laws

    report = check(my_loss, family="policy_loss")      # or family="kl", "gae", ...: families.FAMILIES
    report.assert_ok()                                 # AssertionError with the counterexamples
    report.broken                                      # {law: Outcome}, .status and .counterexample of each
    report.record()                                    # the JSON of `jaxpt verify --json`, as a dict
    print(report.text())                               # the same for readers

    test_my_loss = laws(my_loss, family="policy_loss") # in a test file: every law is a test of its own

    check(fn, family, *, claim=(), like=None, framework=None, mask="float", examples=200, seed=0, dtype="float32",
          only=None, name=None) -> Report

fn takes the family's arguments by position, in their order; further parameters need defaults, but those that the
family knows as optional (margin, group, totals, key, ...) are given where a parameter of that name exists. It may
return (loss, extras). A loss that sums over devices by itself names the axis by a parameter axis_name, whose default is
None: law shard. claim: names of contract laws (choices that not every right function makes), or of waivers,
which say why some law is not meant to hold: `jaxpt list invariants` shows both. like: a row of the table of
objectives; its claims are applied, and fn is compared with it. framework: "jax", "numpy" or "torch", that of
the function's annotations or code when None; where these leave several, the first whose arrays it takes and returns.
only: names of laws, to run no others.

A function that cannot be checked at all (wrong arity or shape; raises or gives NaN on every example) raises
TargetError; one that raises on some breaks the laws that met these.
Importing this package imports neither jax nor numpy.
"""

_FROM = {
    "check": "checking", "laws": "checking", "Report": "report", "Outcome": "report", "TargetError": "target",
    "load": "target",
}


def __getattr__(name: str):
    from importlib import import_module

    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
