"""A tokenizer of letters, for stop strings."""

from __future__ import annotations


class Letters:
    """Token i is a letter."""

    def decode(self, ids, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        return "".join(chr(ord("A") + i) for i in ids)
