import random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.detokenizer import IncrementalDetokenizer
from pdserve.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


# SmolLM2's vocabulary lacks some control characters and the bytes that begin characters of the higher planes.
known = st.characters(max_codepoint=0x1FFFF, exclude_categories=("Cs", "Cc"), exclude_characters="\ufffd")


@given(st.text(alphabet=known))
def test_no_broken_character_is_ever_shown(smollm2: Tokenizer, text: str) -> None:
    pieces = stream(smollm2, [], smollm2.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.one_of(st.integers(0, 280), st.integers(0, 49151)), max_size=30), st.booleans(), st.data())
def test_any_tokens_cut_anywhere_give_what_decode_gives(
    smollm2: Tokenizer, ids: list[int], skip: bool, data: st.DataObject
) -> None:
    detokenizer = IncrementalDetokenizer(smollm2, [], skip)
    shown, rest = "", ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        shown += detokenizer.push(rest[:count])
        rest = rest[count:]
    assert shown + detokenizer.flush() == smollm2.decode(ids, skip)


def test_an_unfinished_character_comes_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a😀")
    assert len(ids) > 2
    assert stream(smollm2, [], ids[:-1])[-1] == "\ufffd"
    assert "".join(stream(smollm2, [], ids[:-1])[:-1]) == "a"


def test_a_character_that_begins_in_the_prompt_is_completed(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a😀b")
    for cut in range(1, len(ids)):
        text = "".join(stream(smollm2, ids[:cut], ids[cut:]))
        assert "\ufffd" not in text
        assert "a😀b".endswith(text)
    assert "".join(stream(smollm2, ids[:2], ids[2:])) == "😀b"


def test_sentence_piece_keeps_the_space_after_a_prompt_only(spm: Tokenizer) -> None:
    hello, world = (spm.token_to_id(f"\u2581{word}") or 0 for word in ("hello", "world"))
    assert "".join(stream(spm, [], [hello, world])) == "hello world"
    assert "".join(stream(spm, [hello], [world])) == " world"
    # A prompt of BOS alone shows nothing, so the answer's first word begins the text.
    assert "".join(stream(spm, [1], [hello, world])) == "hello world"
    assert "".join(stream(spm, [1], [hello], skip=False)) == " hello"


def test_sentence_piece_streams_equal_decode(spm: Tokenizer) -> None:
    source = random.Random(2)
    for _ in range(500):
        prompt, ids = ([source.randrange(268) for _ in range(source.randint(0, 6))] for _ in range(2))
        for skip in (True, False):
            assert "".join(stream(spm, [], ids, skip)) == spm.decode(ids, skip)
            whole, before = spm.decode(prompt + ids, skip), spm.decode(prompt, skip)
            if "\ufffd" not in whole + before and before:
                assert "".join(stream(spm, prompt, ids, skip)) == whole[len(before) :]


def test_special_tokens_are_left_out_but_for_those_to_show(smollm2: Tokenizer) -> None:
    start, end = (smollm2.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert start is not None
    assert end is not None
    ids = [start, *smollm2.encode("Hi"), end]
    assert IncrementalDetokenizer(smollm2, []).push(ids) == "Hi"
    assert IncrementalDetokenizer(smollm2, [], shown_special_ids=frozenset((start,))).push(ids) == "<|im_start|>Hi"
