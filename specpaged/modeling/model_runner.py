"""Forward passes of one model on its paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged.modeling.attention.new_pass import new_pass
from specpaged.modeling.cuda_graphs import CudaGraphs
from specpaged.modeling.forward_output import (
    Argmax,
    DraftedTokens,
    Features,
    ForwardOutput,
    ForwardRequest,
    GreedyTokens,
    HiddenStates,
    HiddenStatesRequest,
)
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow
from specpaged.modeling.rounds import DecodingRow, Rounds
from specpaged.paging.kv_cache import KVCache
from specpaged.speculation.stop_rule import StopRule


class ModelRunner:
    """Runs packed batches. Blocks, lengths and tokens come as values in each batch; who allocated them is unknown here.

    `gathered_bytes` and `filler_rows` count over the runner's life; filler rows are those of passes, of their logits
    and of the last layer where it runs for rows of its own, not what a single kernel adds to its own tiles, nor what
    fills up a captured pass. With `graphs`, passes that fit are replayed.
    """

    def __init__(self, model: LoadedModel, kv_cache: KVCache, graphs: CudaGraphs | None = None):
        if kv_cache.kv_spec != model.kv_spec:
            raise ValueError(f"kv_cache must have the model's layers {model.kv_spec}, got {kv_cache.kv_spec}")
        self.model = model
        self.kv_cache = kv_cache
        self.graphs = graphs
        self.gathered_bytes = 0
        self.filler_rows = 0
        # Whether `greedy` makes passes: where they are one call into our kernels.
        self.runs_greedy = model.backend == "cpp" and getattr(model.decoder, "runs_greedy", False)

    @torch.inference_mode()
    def forward(
        self,
        batch: RaggedBatch,
        *,
        argmax_of: int | None = None,
        hidden: HiddenStatesRequest | None = None,
        features: Features | None = None,
    ) -> ForwardOutput:
        """Writes the KV of the batch's N tokens, and computes logits [M, V] float32 of the rows that ask for them.

        With `argmax_of`, the argmax of as many leading columns comes in place of the logits, which then need never be
        in memory. With `hidden`, hidden states of the batch's `hidden_idx` come along; under numerics="exact" no bit of
        the logits changes with that, and "fast" promises nothing. `features` are what heads read beside their tokens.

        Raises:
            ValueError: `hidden` names a layer that the model does not have, or the model does not show its layers.
        """
        if hidden is not None:
            hidden.check(len(self.kv_cache.layers))
        if batch.hidden_idx is None:
            hidden = None
        fused = self.model.has_argmax and len(batch.logits_idx) > 0
        output = self._run(batch, argmax_of if fused else None, hidden, features)
        if output.argmax is not None:
            return output
        logits = output.logits.float()
        if argmax_of is not None:
            return ForwardOutput(None, Argmax.of(logits[:, :argmax_of]), output.hidden_states)
        return ForwardOutput(logits, None, output.hidden_states)

    def check_hidden_states(self, hidden: HiddenStatesRequest) -> None:
        """Raises the ValueError that `forward` would, before there is anything to run."""
        hidden.check(len(self.kv_cache.layers))
        check = getattr(self.model.decoder, "check_shows_layers", None)
        if check is not None:
            check()

    @torch.inference_mode()
    def recur(self, hidden: Tensor, token_ids: Tensor) -> ForwardOutput:
        """What heads whose further passes read no KV find behind one more token [M] int64 of each of their hidden
        states [M, H]: logits [M, V] float32, and hidden states.
        """
        logits, hidden = self.model.decoder.recur(hidden, token_ids)
        return ForwardOutput(logits.float(), None, HiddenStates(hidden, ()))

    @torch.inference_mode()
    def greedy_steps(
        self, batches: Sequence[RaggedBatch], source_idx: Sequence[Tensor | None], vocab_size: int
    ) -> list[DraftedTokens]:
        """Passes of which each runs the most likely tokens of the one before, among the first vocab_size ids.

        The first one runs its own `token_ids`, which the others need not have. Row n of pass s runs what row
        source_idx[s][n] ([N] int64) of pass s - 1's logits came to; None: row n. Returns what each pass finds. Nobody
        waits for a device between them.
        """
        drafted: list[DraftedTokens] = []
        for batch, rows in zip(batches, source_idx, strict=True):
            if drafted:
                token_ids = drafted[-1].token_ids
                batch = replace(batch, token_ids=token_ids if rows is None else token_ids.index_select(0, rows))
            drafted.append(DraftedTokens.of(self.forward(batch).logits[:, :vocab_size]))
        return drafted

    def greedy(
        self,
        rows: Sequence[RaggedRow],
        num_ids: int,
        num_further: Sequence[int] | None = None,
        *,
        wants_logprobs: bool = False,
        stop_rule: StopRule | None = None,
        features: Tensor | None = None,
    ) -> list[GreedyTokens]:
        """The most likely token, of the first num_ids ids, behind each of a row's last `num_logits` tokens.

        And, where a row wants `num_further` tokens, in further passes what follows the last one found: its page table
        has slots for all of these but the last. Returns what each pass finds. With a `stop_rule`, which is for the
        first rows, and no others go on, there are fewer passes where it says so. `features` [N, F] are what heads read
        beside the rows' tokens. Only where it `runs_greedy`.
        """
        self._check_threads()
        further = [0] * len(rows) if num_further is None else num_further
        read = () if features is None else (features,)
        return self.model.decoder.greedy(rows, self.kv_cache, num_ids, further, wants_logprobs, stop_rule, *read)

    def rounds(
        self,
        rows: Sequence[DecodingRow],
        num_ids: int,
        num_rounds: int,
        draft: ModelRunner | None = None,
        stop_rule: StopRule | None = None,
        goes_on: bool = False,
        tells_found: bool = False,
    ) -> Rounds:
        """Rounds of these sequences by the most likely tokens, of the first num_ids ids, in one call.

        In front of each but the first `draft` drafts for the rows that want drafts, or each one's own `lookup` does, to
        which what comes is added; by a `stop_rule` of these rows, if there is one, which also leaves out drafts. Heads
        run what stands of all rows, those that a target's pass has come behind. What lookups have found and no row has
        taken comes along with `tells_found`.
        Rounds are fewer than `num_rounds` where a sequence ends, with the one in which it does, and where a row has no
        most likely token, before that round.
        Only where both models run greedily.
        """
        self._check_threads()
        decoder = self.model.decoder
        drafting = None if draft is None else draft.model.decoder.rounds_model(draft.kv_cache, num_ids)
        return decoder.rounds(rows, self.kv_cache, num_ids, num_rounds, drafting, stop_rule, goes_on, tells_found)

    def _check_threads(self) -> None:
        model = self.model
        if model.exact and torch.get_num_threads() != model.num_threads:
            raise RuntimeError(
                f"the model was loaded for numerics='exact' with {model.num_threads} threads and runs with "
                f"{torch.get_num_threads()}: call torch.set_num_threads before loading it"
            )

    def _run(
        self,
        batch: RaggedBatch,
        argmax_of: int | None,
        hidden: HiddenStatesRequest | None,
        features: Features | None,
    ) -> ForwardOutput:
        """One pass, captured or not; logits in the model's dtype. `hidden` needs a batch with `hidden_idx`."""
        model = self.model
        self._check_threads()
        replayed = None if self.graphs is None else self.graphs.run(batch, argmax_of, hidden)
        if replayed is not None:
            return replayed
        num_tokens, num_logits = batch.num_tokens, len(batch.logits_idx)
        filler = -num_tokens % model.row_multiple
        token_ids, positions = batch.token_ids, batch.positions
        if filler:
            token_ids, positions = F.pad(token_ids, (0, filler)), F.pad(positions, (0, filler))
            features = features and features.filled_up(filler)
            self.filler_rows += filler
        logits_idx = None  # every row
        if num_logits != num_tokens:
            logits_idx = self._filled_up(batch.logits_idx, 0)
        output_idx = logits_idx
        if hidden is not None and hidden.last and logits_idx is not None:
            output_idx = batch.output_idx()
            # The last row of the pass, so that they ascend.
            output_idx = None if len(output_idx) == num_tokens else self._filled_up(output_idx, len(token_ids) - 1)
        request = ForwardRequest(logits_idx, output_idx, argmax_of, hidden, batch.hidden_idx, features)
        paged_pass = new_pass(model, batch, len(token_ids), self.kv_cache.layers)
        output = model.run(token_ids, positions, paged_pass, request)
        self.gathered_bytes += paged_pass.gathered_bytes
        return output.first_rows(num_logits)

    def _filled_up(self, rows: Tensor, filler_row: int) -> Tensor:
        """Rows of a pass [n] int64, filled up to the multiple that the model's kernels want; counts the filler."""
        filler = -len(rows) % self.model.row_multiple
        self.filler_rows += filler
        return F.pad(rows, (0, filler), value=filler_row)
