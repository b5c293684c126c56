"""The tiny policy's tokenizer: frequent words are tokens; digits, grid letters and punctuation stay single."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant", "tool")
ACTION_TAGS = ("act", "tool", "answer", "edit")
END_OF_TURN = "<|end|>"
PADDING = "<|pad|>"
SPECIAL_TOKENS = (
    PADDING,
    END_OF_TURN,
    *(f"<|{role}|>" for role in ROLES),
    *(text for tag in ACTION_TAGS for text in (f"<{tag}>", f"</{tag}>")),
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# A piece is a word with the space before it, a run of spaces, or one character of anything else. An upper-case letter
# belongs to a word only when a lower-case one follows: the rows of a grid stay letters.
PIECES = r" ?[A-Z]?[a-z]+| +|[^ A-Za-z]|[A-Z]"


def train_tokenizer(
    corpus: Iterable[str], *, vocab_size: int, min_word_frequency: int, context_length: int
) -> PreTrainedTokenizerFast:
    """Build a tokenizer from environment text (observations and actions, in any order). Takes about 0.1 s per MB.

    The vocabulary is the special tokens, the 256 bytes, and the words that save most tokens, at most ``vocab_size``
    in all. A known word is one token and any other text is bytes, so everything encodes, and decodes to itself. BPE
    without merges gives just that (its ``ignore_merges`` looks a piece up whole first), where merges would spend two
    thirds of a small vocabulary on fragments. Raises ValueError on an empty corpus.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = _choose_words(corpus, vocab_size - len(SPECIAL_TOKENS) - 256, min_word_frequency)
    spelled = ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(word)) for word in words]
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled]

    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    )
    # The stubs of `tokenizers` declare these properties read-only; the library documents assignment.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (END_OF_TURN, PADDING)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def _choose_words(corpus: Iterable[str], limit: int, min_frequency: int) -> list[str]:
    """The pieces of several characters that save most tokens, best first; ties in alphabetical order."""
    special = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    pieces = re.compile(PIECES)
    counts: Counter[str] = Counter()
    for text in corpus:
        for part in special.split(text):
            counts.update(pieces.findall(part))
    if not counts:
        raise ValueError("the tokenizer's corpus is empty; pass the messages and actions of some scripted episodes")
    words = [word for word, count in counts.items() if len(word) > 1 and count >= min_frequency]
    return sorted(words, key=lambda word: (-counts[word] * (len(word) - 1), word))[:limit]
