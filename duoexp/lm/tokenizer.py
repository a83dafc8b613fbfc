"""What tells one tokenizer from another."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all tokens in the order of their ids. Equal only if an id means the same to both."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
