"""Log-probabilities of a prompt's own tokens, collected chunk by chunk while it is prefilled.

Prompt a b c d in chunks of 2. The logits behind token i speak of token i + 1, those behind d of the first output:

    chunk 1 runs  a b    rows of a, b    log p(b), log p(c)
    chunk 2 runs  c d    row of c        log p(d)               the first token's is None by definition
"""

from __future__ import annotations

from torch import Tensor

from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.sampling.logprobs import token_logprobs


def wants_prompt_logits(entry: ScheduledSequence) -> bool:
    """Whether this chunk runs the first prompt token whose successor's log-probability is still unknown."""
    sequence = entry.sequence
    if sequence.params.prompt_logprobs is None or sequence.child_idx > 0:
        return False
    first = _num_known(sequence) - 1
    return first < sequence.num_prompt_tokens - 1 and 0 <= first - entry.context_len < entry.num_new_tokens


def prompt_rows(entry: ScheduledSequence) -> slice:
    """The rows of the chunk whose logits are wanted, counted from its first token."""
    first, last = _num_known(entry.sequence) - 1, entry.sequence.num_prompt_tokens - 1
    return slice(first - entry.context_len, last - entry.context_len)


def record_prompt_logprobs(sequence: Sequence, logits: Tensor) -> None:
    """Append the log-probabilities that the rows of `prompt_rows` give, [rows, V] float32."""
    first = _num_known(sequence)
    if sequence.prompt_logprobs is None:
        sequence.prompt_logprobs = [None]
    targets = sequence.token_ids[first : first + logits.shape[0]]
    sequence.prompt_logprobs.extend(token_logprobs(logits, targets, sequence.params.prompt_logprobs))


def _num_known(sequence: Sequence) -> int:
    """The number of prompt tokens whose log-probability is known."""
    return len(sequence.prompt_logprobs or (None,))
