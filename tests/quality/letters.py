"""A tokenizer for the tiny models that keeps a text apart: their words are numbers, and all others are one."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny


def letters() -> TokenizerWrapper:
    """A tokenizer for the tiny models in which every ASCII character is its own token."""
    signs = Tokenizer(models.WordLevel({chr(i): i for i in range(tiny.VOCAB)}, unk_token="?"))
    signs.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[reportAttributeAccessIssue]
    signs.decoder = decoders.Fuse()  # type: ignore[reportAttributeAccessIssue]
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=signs))
