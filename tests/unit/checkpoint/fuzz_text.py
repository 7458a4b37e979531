"""Strings of the kinds on which tokenizers disagree, from a fixed seed."""

import random
from collections.abc import Iterator

KINDS: dict[str, list[str]] = {
    "digits": ["0", "1", "42", "2024", "3.14", "1,000,000", "٣", "²", "½", "①", "１２", "99999", "Ⅷ"],
    "spaces": [" ", "  ", "    ", "\t", "\t\t", " \t ", "\u00a0", "\u3000", "\u2003", "\u200b"],
    "newlines": ["\n", "\n\n", "\r\n", "\r", " \n", "\n  ", "\n\t", "\u2028", "\x0b", "\x0c", "\x85", "\n\n\n"],
    "emoji": ["😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🏴‍☠️", "🤖"],
    "cjk": ["你好", "世界", "日本語", "テスト", "한국어", "。", "，", "「", "ひらがな", "漢字123"],
    "marks": ["e\u0301", "n\u0303", "a\u0308\u0323", "\u0915\u093f", "\u0e01\u0e34", "é", "ñ", "Å", "\u0651"],
    "code": ["def f(x):", "x**2;", "if (a&&b){", "}", "//", "#include", "<div>", "__init__", "->", '"', "'", "a[i]"],
    "symbols": ["$", "€", "~", "^", "|", "…", "—", "\\n", "`", "_", "+=", "%"],
    "words": ["hello", "World", "the", "I'm", "don't", "WE'LL", "it's", "'S", "'re", "naïve", "ß", "Привет"],
    "scripts": ["שלום", "مرحبا", "CamelCase", "ALLCAPS", "ǅ", "'ſ", "Ünïcödé"],
    "specials": ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<s>", "</s>", "<0x0A>", "<|", "|>", "▁", "▁▁"],
}
_RANGES = [(0x1, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20, 0x7E)]


def fuzz_strings(count: int, seed: int, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Strings of one kind or of all, joined with and without spaces; some characters from anywhere."""
    source = random.Random(seed)
    names = [name for name in KINDS if name not in without]
    for _ in range(count):
        pool = [source.choice(names)] if source.random() < 0.4 else names
        pieces = []
        for _ in range(source.randint(1, 14)):
            if source.random() < 0.04:
                pieces.append(chr(source.randint(*source.choice(_RANGES))))
            else:
                pieces.append(source.choice(KINDS[source.choice(pool)]))
            if source.random() < 0.3:
                pieces.append(" ")
        yield "".join(pieces)
