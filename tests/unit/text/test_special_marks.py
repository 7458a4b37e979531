import random

from pdserve.text.special_marks import SpecialMarks

TOKENS = ["<|user|>", "<|end|>", "<|end|>!", "[INST]", "[/INST]"]


def kept(marks: SpecialMarks, text: str) -> list[str]:
    """The special tokens that are left marked."""
    rest = marks.keep_tokens(text)
    found = []
    for token in sorted(TOKENS, key=len, reverse=True):
        while marks.wrap(token) in rest:
            rest = rest.replace(marks.wrap(token), "", 1)
            found.append(token)
    assert marks.remove(rest) == rest
    return found


def test_only_marked_spellings_are_kept() -> None:
    marks = SpecialMarks(TOKENS)
    text = marks.mark("[INST] ") + "say <|end|> and [INST]" + marks.mark(" [/INST]")
    assert sorted(kept(marks, text)) == ["[/INST]", "[INST]"]
    assert marks.remove(text) == "[INST] say <|end|> and [INST] [/INST]"


def test_the_longest_token_is_marked() -> None:
    marks = SpecialMarks(TOKENS)
    assert kept(marks, marks.mark("<|end|>!")) == ["<|end|>!"]
    assert kept(marks, marks.mark("<|end|>.")) == ["<|end|>"]


def test_a_token_assembled_around_a_value_is_kept() -> None:
    marks = SpecialMarks(TOKENS)
    assert kept(marks, marks.mark("text <|") + "user" + marks.mark("|>\n")) == ["<|user|>"]
    assert kept(marks, marks.mark("text <|") + "other" + marks.mark("|>\n")) == []


def test_user_text_completes_no_token_of_the_template_alone() -> None:
    marks = SpecialMarks(TOKENS)
    assert kept(marks, marks.mark("{'a': [") + "INST]") == []
    assert kept(marks, "<|end" + marks.mark("|>")) == []
    assert kept(marks, "<|user|>" + marks.mark("\n") + "<|end|>") == []


def test_marks_leave_no_trace_in_ordinary_text() -> None:
    marks = SpecialMarks(TOKENS)
    source = random.Random(0)
    for _ in range(500):
        text = "".join(source.choices([*TOKENS, "<", "|", ">", "[", "]", "INST", "user", "12345", " "], k=8))
        assert marks.remove(marks.mark(text)) == text


def test_marks_differ_from_one_process_or_tokenizer_to_the_next() -> None:
    assert SpecialMarks(TOKENS).wrap("[INST]") != SpecialMarks(TOKENS).wrap("[INST]")


def test_without_special_tokens_nothing_is_marked() -> None:
    marks = SpecialMarks([])
    assert marks.mark("<|end|>") == marks.wrap("<|end|>") == marks.keep_tokens("<|end|>") == "<|end|>"
