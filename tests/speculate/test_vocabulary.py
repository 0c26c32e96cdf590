"""Which tokens a target and a draft share: equal tokenizers, padding, other ids for the same tokens, other tokens. Case 40."""

import pytest
import torch

from specter_lab.speculate.vocabulary import UNKNOWN, SharedTokens, Words, match


class Tokenizer:
    """A vocabulary, its last ``added`` tokens marked as added."""

    def __init__(self, tokens, added=0):
        self.vocabulary = {token: number for number, token in enumerate(tokens)}
        self.marks = dict(list(self.vocabulary.items())[len(tokens) - added :]) if added else {}

    def get_vocab(self):
        return self.vocabulary

    def get_added_vocab(self):
        return self.marks


def ids(target, draft, sizes=(4, 4)):
    return match(Words("big", target, sizes[0]), Words("small", draft, sizes[1])).tolist()


@pytest.mark.parametrize(
    ("target", "draft", "sizes", "expected"),
    [
        (None, None, (4, 4), [0, 1, 2, 3]),
        (None, Tokenizer("abcd"), (4, 4), [0, 1, 2, 3]),
        (Tokenizer("abc"), Tokenizer("abc"), (6, 4), [0, 1, 2, 3, -1, -1]),  # 152064 rows for one, 151936 for the other
        (Tokenizer("abc"), Tokenizer("abc"), (4, 6), [0, 1, 2, 3]),
        (Tokenizer("abc"), Tokenizer("cab"), (4, 4), [1, 2, 0, -1]),  # renumbered; padding has no token
        (Tokenizer("abcX", 1), Tokenizer("abcYZ", 2), (4, 5), [0, 1, 2, -1]),  # other added tokens
        (Tokenizer("abcXY", 2), Tokenizer("abcYX", 2), (5, 5), [0, 1, 2, 4, 3]),
        (Tokenizer("abcX", 1), Tokenizer("Xbca"), (4, 4), [3, 1, 2, 0]),  # an added token of one is a regular one of the other
        (Tokenizer("abc"), Tokenizer("cab"), (3, 2), [1, -1, 0]),  # more tokens than the draft has rows
    ],
)
def test_equal_tokens_are_matched(target, draft, sizes, expected):
    """Case 40: also where one vocabulary is padded further than the other."""
    assert ids(target, draft, sizes) == expected


@pytest.mark.parametrize(
    ("target", "draft", "first"),
    [("abcd", "abXd", "lacks 1 of the 4 tokens of big .* has 1 others; .* is id 2, 'c'"), ("abc", "abcd", "lacks 0 .* is id 3, 'd'")],
)
def test_other_tokens_are_refused_by_name(target, draft, first):
    with pytest.raises(ValueError, match=r"tokenizer of small \(Tokenizer\)") as refusal:
        ids(Tokenizer(target), Tokenizer(draft))
    assert refusal.match(first) and refusal.match("Use a draft with the target's tokenizer, SelfDrafter, or PromptLookupDrafter")


def test_a_missing_token_has_no_probability_and_is_not_read():
    shared = SharedTokens(torch.tensor([2, -1, 0]))
    logits = torch.tensor([-3.0, 50.0, 1.0], dtype=torch.float16)
    probs = shared.logits(logits).softmax(-1)
    assert probs[1] == 0 and probs.sum() == pytest.approx(1) and shared.logits(logits).dtype == torch.float32
    assert shared.read([2, 1, 1, 0]) == [0, 2]
    forbidden = torch.tensor([-torch.inf, 0.0, -torch.inf])  # a processor that allows nothing but what the draft lacks
    assert (shared.logits(logits) + forbidden).softmax(-1).tolist() == [0, 1, 0] and UNKNOWN < -1e8
