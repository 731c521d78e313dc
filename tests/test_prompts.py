"""Texts to train on: where an answer's tokens begin, and what a prompt stands in."""

import json

import pytest

from jaxpt.lab import prompts, tokenizer
from jaxpt.lab.errors import UserError

BYTES = tokenizer.Tokenizer(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), (), lambda text: list(text.encode()))


def test_an_answer_s_tokens_are_those_behind_its_prompt(tmp_path):
    """A tokenizer of pairs of letters: where the seam falls inside a pair, the answer is read by itself."""
    def pairs(text):
        return [1, *(ord(text[i]) * 256 + ord(text[i + 1 : i + 2] or "\0") for i in range(0, len(text), 2))]

    words = tokenizer.Tokenizer(pairs, str, (9,), lambda text: pairs(text)[1:])
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "ab", "response": "cd"}, {"prompt": "abc", "response": "de"}, {"prompt": "", "response": ""}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = prompts.read(file, "sft", words, 9, 1, False)
    assert [t.line for t in found.kept] == [1, 3, 5] and found.cut == 0
    (one,), (two,), (three,) = (t.answers for t in found.kept)
    assert (one, two, three) == ([*pairs("cd")[1:], 9], [*pairs("de")[1:], 9], [9])
    assert found.kept[0].prompt + one == [*pairs("abcd"), 9]
    cut = prompts.read(file, "sft", words, 3, 1, True)
    assert cut.cut == 1 and cut.kept[0].answers == (pairs("cd")[1:],)


@pytest.mark.parametrize("file, template", [
    (b"{prompt}", "{prompt}"), (b"Q: {prompt}\nA:\n", "Q: {prompt}\nA:"), (b"\xef\xbb\xbf{prompt}\n\n", "{prompt}\n"),
    (b"{prompt} and {prompt}, {x}", "{prompt} and {prompt}, {x}"), (b"{prompt}\r\n", "{prompt}"),
    (b"{ prompt }", "is expected in it"), (b"\xff{prompt}", "UTF-8"),
])
def test_a_template_is_a_file_less_the_editor_s_newline(tmp_path, file, template):
    (tmp_path / "t").write_bytes(file)
    if "{prompt}" in template:
        assert prompts.read_template(tmp_path / "t") == template
    else:
        with pytest.raises(UserError, match=template):
            prompts.read_template(tmp_path / "t")


def test_a_prompt_s_own_words_are_no_template():
    row = json.dumps({"prompt": "{prompt} {x}", "response": "b"}).encode()
    (text,) = prompts.of_lines([row], "rows", "sft", BYTES, 40, 1, False, "[{prompt}|{prompt}]").kept
    assert bytes(text.prompt) == b"[{prompt} {x}|{prompt} {x}]" and bytes(text.answers[0]) == b"b" and text.row["prompt"] == "{prompt} {x}"
