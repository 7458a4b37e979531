"""Prompts of random words with an exact number of tokens, some of them behind shared prefixes."""

from __future__ import annotations

import random

from pdserve.text.tokenizer import Tokenizer

_COMMON_WORDS = (
    "about above after again air all along also always animal another answer any area around ask away back base be "
    "because before began begin best better big bird black blue boat body book both box boy bring build built busy "
    "call came can car care carry cause change check city class clear close cold color come common complete cook "
    "could country course cover cross cry cut dark day deep did differ do dog door down draw drive dry during each "
    "early earth ease east eat end enough even ever every example eye face fact fall family far farm fast father "
    "feel feet few field figure fill final find fine fire first fish five fly follow food foot force form found "
    "four free friend from front full game gave get girl give go gold good got govern great green ground group grow "
    "had half hand happen hard has have head hear heat help here high hold home horse hot hour house how hundred idea "
    "inch interest island keep kind king knew know land language large last late laugh lay lead learn leave left less "
    "let letter life light like line list listen little live long look lot love low machine made main make man many "
    "map mark may mean measure men might mile mind minute miss money moon more morning most mother mountain move much "
    "music must name nation near need never new next night north note nothing notice noun now number object ocean off "
    "often oil old once one only open order other our out over own page paper part pass pattern people perhaps "
    "person piece place plain plan plane plant play point port pose possible pound power press problem produce "
    "product pull put question quick rain ran reach read ready real record red remember rest right river road rock "
    "room round rule run said sail same saw say school science sea second see seem self sentence serve set several "
    "shape ship short should show side simple since sing six size sleep slow small snow some song soon sound south "
    "special spell stand star start state stay step still stood stop story street strong study such sun sure surface "
    "system table tail take talk teach tell ten test than that their them then there these thing think those thought "
    "thousand three through time today together told too took top toward town travel tree true try turn two under "
    "unit until use usual very voice vowel wait walk want war warm was watch water way week weight well went were "
    "west what wheel where which while white who whole why will wind wish with wonder wood word work world would "
    "write year yes young"
)
_WORDS = tuple(_COMMON_WORDS.split())
_MIN_WORDS = 64
_MAX_CORRECTIONS = 16


class SyntheticText:
    """Makes texts of a wanted number of tokens.

    Args:
        tokenizer: the model's; None = a word is taken for a token, which is near for common tokenizers.
        seed: equal seeds give equal texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._words = _WORDS
        if tokenizer is not None:
            single = tuple(word for word in _WORDS if _is_single(tokenizer, word))
            self._words = single if len(single) >= _MIN_WORDS else _WORDS

    def build(self, num_tokens: int, prefix: str = "") -> str:
        """A text of ``num_tokens`` tokens, what the tokenizer puts around it included.

        Args:
            num_tokens: at least 1.
            prefix: a text that it begins with and that counts; shorter than ``num_tokens``.
        """
        words = prefix.split()
        head_len = len(words)
        words += self._draw(num_tokens - len(words))
        for _ in range(_MAX_CORRECTIONS):
            missing = num_tokens - self._count(words)
            if missing == 0:
                break
            words = [*words, *self._draw(missing)] if missing > 0 else words[: max(len(words) + missing, head_len + 1)]
        return " ".join(words)

    def _draw(self, count: int) -> list[str]:
        return self._random.choices(self._words, k=max(count, 0))

    def _count(self, words: list[str]) -> int:
        return len(words) if self._tokenizer is None else len(self._tokenizer.encode(" ".join(words)))


def _is_single(tokenizer: Tokenizer, word: str) -> bool:
    alone = tokenizer.encode(word, add_special_tokens=False)
    behind = tokenizer.encode(f"so {word}", add_special_tokens=False)
    return len(alone) == 1 and len(behind) == 2
