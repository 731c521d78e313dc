"""The README's table of laws that other libraries break, as far as it needs none of them; tests/peers has the rest."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("verify_peers", ROOT / "scripts" / "verify_peers.py")
verify_peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verify_peers)
RECORD = json.loads(verify_peers.FINDINGS.read_text())


def test_the_readme_shows_the_counterexamples_on_record():
    table = (ROOT / "README.md").read_text().partition(verify_peers.BEGIN)[2].partition(verify_peers.END)[0]
    assert table.strip() == verify_peers.markdown(RECORD).strip()


def test_a_package_of_every_kind_and_many_functions():
    assert set(RECORD["versions"]) == {"trl", "verl", "openrlhf", "tunix", "skyrl", "rlax", "optax"}
    assert len({asked["target"].partition("[")[0] for asked in RECORD["asked"]}) >= 20


def test_without_the_peers_it_says_what_to_run(monkeypatch, capsys):
    monkeypatch.setattr(verify_peers, "NEEDED", ("pytest", "no_such_peer"))
    monkeypatch.setattr(sys, "prefix", str(ROOT / "tests"))
    assert verify_peers.main([]) == 2
    assert capsys.readouterr().err == (
        "verify_peers: the peers' environment is not complete here (no no_such_peer, the wheels' files): "
        "run scripts/test --peers once, then .venv-peers/bin/python scripts/verify_peers.py\n"
    )


@pytest.mark.parametrize("old_seed", [0, 1])
def test_functions_that_are_asked_again_replace_their_entries_alone(monkeypatch, tmp_path, old_seed):
    entry = lambda target, law: {"target": target, "law": law}  # noqa: E731
    old = {"seed": old_seed, "asked": [entry("a", 1), entry("b", 1), entry("gone", 1)], "findings": [entry("b", 1)]}
    new = {"seed": 0, "asked": [entry("b", 2)], "findings": [entry("b", 2), entry("b", 3)]}
    (tmp_path / "findings.json").write_text(json.dumps(old))
    monkeypatch.setattr(verify_peers, "FINDINGS", tmp_path / "findings.json")
    if old_seed:
        with pytest.raises(ValueError, match="found with seed 1"):
            verify_peers.renewed(new, ["b", "a"])
        return
    assert verify_peers.renewed(new, ["b", "a"]) == {
        "seed": 0, "asked": [entry("b", 2), entry("a", 1)], "findings": [entry("b", 2), entry("b", 3)],
    }  # fmt: skip
