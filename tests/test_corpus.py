"""Reading corpora: what is text, in which order, and the sentences of errors."""

import os
import random
import string
from dataclasses import replace

import numpy as np
import pytest

from jaxpt.experiments import pretrain_text
from jaxpt.lab import corpus
from jaxpt.lab.errors import UserError


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_a_folder_is_read_in_order_and_binaries_are_counted(tmp_path):
    write(tmp_path, {
        "b.txt": b"bee", "a/z.md": "zed \u00e9".encode(), "a.txt": b"ay", "empty.txt": b" \n",
        ".git/HEAD": b"ref", ".hidden": b"no", "a/.cache/x": b"no",
        "image.bin": b"\x89PNG\0\0", "utf16.txt": "text".encode("utf-16"), "latin.txt": b"\xff\xfe\xfd",
        "one_bad.txt": b"x" * 200 + b"\xe9",
    })
    found = corpus.read(str(tmp_path))
    names = [os.path.relpath(name, tmp_path) for name, _ in found.documents]
    assert names == ["a/z.md", "a.txt", "b.txt", "one_bad.txt"]
    assert found.skipped == {"binary": 3, "empty": 1}


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path, {"a/x.txt": b"ex"})
    (tmp_path / "a" / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "twin").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    found = corpus.read(str(tmp_path))
    assert [text for _, text in found.documents] == [b"ex"] and found.skipped == {"unreadable": 1}


def test_the_limit_is_kept(tmp_path):
    write(tmp_path, {"a": b"x" * 60, "b": b"y" * 60, "c": b"z"})
    found = corpus.read(str(tmp_path), limit=100)
    assert [len(text) for _, text in found.documents] == [60, 40] and found.skipped == {"over the limit": 1}
    assert corpus.read(str(tmp_path / "a"), limit=10).documents[0][1] == b"x" * 10


@pytest.mark.parametrize("files, path, expected", [
    ({}, "missing", "no such file"),
    ({}, "", "no files"),
    ({"x.bin": b"\0\1"}, "", "1 binary"),
    ({"x.bin": b"\0\1"}, "x.bin", "1 binary"),
    ({"x.txt": b""}, "x.txt", "1 empty"),
    ({"x.txt": b"short\n"}, "", "5 bytes of distinct text, expected at least"),
    ({f"{i}.txt": b"the same line again\n" * 1000 for i in range(9)}, "", "bytes of distinct text, expected"),
])
def test_errors_are_one_sentence(tmp_path, files, path, expected):
    write(tmp_path, files)
    with pytest.raises(UserError) as error:
        corpus.load(str(tmp_path / path), corpus.LIMIT, 0.1, 1000)
    assert expected in str(error.value) and "--corpus" in str(error.value) and "\n" not in str(error.value)


def test_the_default_corpus_is_real_text_in_a_fixed_order():
    limit = 150_000
    once, again = corpus.read(limit=limit), corpus.read(limit=limit)
    assert once == again and 1 < len(once.documents)
    assert sum(len(text) for _, text in once.documents) == limit
    assert not any(corpus.is_binary(text) for _, text in once.documents)


def test_docstrings_are_found_without_importing(tmp_path):
    write(tmp_path, {"m.py": b'''"""Top."""
raise SystemExit
class A:
    """Class."""
    async def f(self):
        """Method."""
if True:
    def g():
        """Function."""
        x = """no docstring"""
''', "broken.py": b"def ("})
    assert corpus._documentation(tmp_path / "m.py") == b"Top.\n\nClass.\n\nMethod.\n\nFunction."
    assert corpus._documentation(tmp_path / "broken.py") == b""


def test_the_experiment_charges_every_held_out_byte_to_its_block(tmp_path):
    rng = random.Random(0)
    words = [bytes(rng.choices(b"abcdefgh", k=5)) for _ in range(200)]
    write(tmp_path, {f"{i}.txt": b" ".join(rng.choices(words, k=150)) for i in range(120)})
    cfg = replace(pretrain_text.SMOKE, corpus=str(tmp_path))
    found = pretrain_text.inputs(cfg)
    assert 6 <= len(found["xz"]) <= cfg.blocks and len(found["held"]) == len(found["block"])
    per_byte = {name: found[name].sum() / len(found["held"]) for name in ("unigram", "bigram", "xz")}
    assert per_byte["xz"] < per_byte["bigram"] < per_byte["unigram"] < 4  # nine symbols, few words
    assert found["xz_whole"] == pytest.approx(found["xz"].sum(), rel=0.05)
    stages = {stage.name: stage for stage in pretrain_text.stages(cfg, found)}
    for name in ("score", "one_byte_score"):
        unit = stages[name].make.keywords["unit"]
        assert (np.bincount(unit[unit >= 0]) == found["block_bytes"]).all()
        assert stages[name].steps * stages[name].config.batch >= len(unit)


def test_a_text_of_too_few_documents_has_too_few_blocks(tmp_path):
    write(tmp_path, {f"{i}.txt": (string.ascii_letters[i] * 500).encode() for i in range(20)})
    (tmp_path / "long.txt").write_bytes(b"".join(b"%d" % (i * i) for i in range(8000)))
    cfg = replace(pretrain_text.SMOKE, corpus=str(tmp_path), held_share=0.01)
    with pytest.raises(UserError, match="held-out blocks of whole documents, expected at least 6"):
        pretrain_text.inputs(cfg)
