"""SentencePiece BPE's scores as the merge list that a plain BPE model wants."""

from __future__ import annotations

from collections.abc import Mapping


def build_spm_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, best score of the joined piece first.

    SentencePiece joins the neighbours whose union has the best score, whichever pieces they are, so each way to
    cut a piece in two is a merge of its own. Exact where no two pieces have one score, which holds for trained
    vocabularies; equal scores go by the pieces' order here, by place in the text in SentencePiece.

    Args:
        scores: pieces that text may become, with their scores.
    """
    found = []
    for order, (piece, score) in enumerate(scores.items()):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, order, cut, left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]
