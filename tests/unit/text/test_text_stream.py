from pdserve.protocol import SamplingParams
from pdserve.text.text_stream import TextDelta, TextStream
from pdserve.text.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> tuple[str, int, str | None]:
    """Push one token at a time; all shown text, the tokens used and the stop string."""
    stream = TextStream(tokenizer, [], sampling)
    shown, used = "", 0
    for token_id in ids:
        delta = stream.push([token_id])
        shown += delta.text
        used += delta.num_tokens_used
        if delta.stop_string is not None:
            return shown, used, delta.stop_string
    return shown + stream.flush(), used, None


def test_without_stop_strings_everything_is_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Emoji 😀 and 日本語.")
    assert run(smollm2, ids, SamplingParams()) == ("Emoji 😀 and 日本語.", len(ids), None)


def test_the_token_that_completes_a_stop_string_counts_and_later_ones_do_not(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three four")
    sampling = SamplingParams(stop=("thr",))
    assert run(smollm2, ids, sampling) == ("one two ", 3, "thr")
    assert TextStream(smollm2, [], sampling).push(ids) == TextDelta("one two ", 3, "thr", (0, 3, 7))
    assert run(smollm2, ids, SamplingParams(stop=("thr",), include_stop_str_in_output=True))[0] == "one two thr"


def test_a_stop_string_may_span_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three four")
    assert run(smollm2, ids, SamplingParams(stop=("o three f",))) == ("one tw", 4, "o three f")


def test_min_tokens_holds_stop_strings_back(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("no no no no")
    sampling = SamplingParams(stop=("no",))
    assert run(smollm2, ids, sampling)[1:] == (1, "no")
    assert run(smollm2, ids, SamplingParams(stop=("no",), min_tokens=2)) == ("no no ", 3, "no")
    # A stop string that begins within the first min_tokens tokens was shown already and does not count.
    assert run(smollm2, ids, SamplingParams(stop=("no no",), min_tokens=1)) == ("no ", 3, "no no")
    assert run(smollm2, ids, SamplingParams(stop=("no",), min_tokens=9)) == ("no no no no", 4, None)


def test_special_tokens_are_shown_on_request_only(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("hi"), 2]
    assert run(smollm2, ids, SamplingParams())[0] == "hi"
    assert run(smollm2, ids, SamplingParams(skip_special_tokens=False))[0] == "hi<|im_end|>"


def test_the_stop_token_counts_but_is_not_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two")
    for sampling, text in (
        (SamplingParams(), "one"),
        (SamplingParams(include_stop_str_in_output=True), "one two"),
    ):
        stream = TextStream(smollm2, [], sampling)
        assert stream.push(ids, ends_with_stop_token=True) == TextDelta(text, 2, None, (0, 3))
        assert stream.flush() == ""
    stream = TextStream(smollm2, [], SamplingParams(stop=("neither",)))
    assert stream.push([*smollm2.encode("n"), 2], ends_with_stop_token=True).text == ""
    assert stream.flush() == "n"


def test_offsets_are_in_characters_and_split_characters_share_one(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("é😀 x")
    stream = TextStream(smollm2, [], SamplingParams())
    deltas = [stream.push([token_id]) for token_id in ids]
    offsets = [delta.text_offsets[0] for delta in deltas]
    assert offsets[0] == 0
    assert offsets[-1] == 2
    assert sorted(offsets) == offsets
    assert offsets.count(1) == len(ids) - 2
    assert TextStream(smollm2, [], SamplingParams()).push(ids).text_offsets == tuple(offsets)


def test_flush_gives_what_waits_and_an_unfinished_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("wait😀")[:-1]
    stream = TextStream(smollm2, [], SamplingParams(stop=("wait😀!",)))
    assert stream.push(ids).text == ""
    assert stream.flush() == "wait\ufffd"
