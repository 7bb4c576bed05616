"""The frozen target as its heads see it: hidden states from its own runner, its embedding and its output layer.

Dimensions: B sequences of T tokens, right-padded; d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged.modeling.flat.config import FlatConfig, flat_config, why_not
from specpaged.modeling.flat.weights import EMBEDDING, FINAL_NORM, OUTPUT, Checkpoint
from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.loading import load_config, load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache

BLOCK_SIZES = {"cpu": 16, "cuda": 64}
TOKENS_PER_PASS = 8192
KEPT_BYTES = 2**31  # of hidden states, on a CPU, where a pass of the target is two fifths of a step of training
NARROW = 1024  # hidden sizes of models that soon repeat themselves: shorter sequences show heads more of their text


def check_target(target: str, sequence_length: int | None) -> int:
    """The tokens of a sequence, checked against a target that the flat decoder covers, before it is loaded.

    ValueError names --target or --sequence-length.
    """
    try:
        config = load_config(target)
    except ValueError as error:
        raise ValueError(f"--target={target!r}: {error}") from None
    reason = why_not(config, trust_remote_code=False)
    if reason is not None:
        raise ValueError(f"--target={target!r} has hidden states of another kind than heads are trained on: {reason}")
    flat = flat_config(config)
    if flat.hidden_size % flat.num_heads:
        raise ValueError(
            f"--target={target!r} has a hidden size of {flat.hidden_size}, which its {flat.num_heads} heads do not "
            "divide: no config.json of draft heads can say so"
        )
    longest = config.max_position_embeddings
    if sequence_length is None:
        return min(longest, 256 if config.hidden_size < NARROW else 512)
    if sequence_length > longest:
        raise ValueError(f"--sequence-length={sequence_length} must be at most the {longest} positions of {target!r}")
    return sequence_length


Text = tuple[HiddenStatesRequest, tuple[int, ...]]  # what is asked for, of which tokens


class FrozenTarget:
    """A loaded target whose parameters nobody trains."""

    def __init__(self, loaded: LoadedModel, kept_bytes: int = 0):
        """`kept_bytes` of hidden states are kept at most. If any are, each sequence has a pass of its own, so that they
        are those that it would have again."""
        self.loaded = loaded
        self.config: FlatConfig = flat_config(loaded.hf_config)
        self.device = loaded.device
        self._checkpoint = Checkpoint(loaded.name)
        names = [EMBEDDING, FINAL_NORM, *([] if self.config.tied else [OUTPUT])]
        ends = {name: tensor.to(self.device, loaded.dtype) for name, tensor in self._checkpoint.read(names).items()}
        self._embedding = ends[EMBEDDING]
        self._output = ends.get(OUTPUT, self._embedding)
        self.final_norm_weight = ends[FINAL_NORM].float() + self.config.norm_offset  # [d] float32
        multiplier = self.config.embedding_multiplier
        if self.config.rounds_embedding_multiplier:
            multiplier = float(torch.tensor(multiplier).to(loaded.dtype))
        self._embedding_multiplier = multiplier
        self._runner: ModelRunner | None = None
        self._tokens_per_pass = 0 if kept_bytes else TOKENS_PER_PASS
        self._kept: dict[Text, HiddenStates] = {}
        self._room = kept_bytes

    @classmethod
    def load(cls, target: str, sequence_length: int, device: str) -> FrozenTarget:
        """The target in its fast numerics; on a CPU it keeps hidden states. ValueError as `load_model` has it."""
        kind = torch.device(device).type
        arguments = {"device": device, "numerics": "fast", "model_impl": "flat", "block_size": BLOCK_SIZES[kind]}
        loaded = load_model(target, max_model_len=sequence_length, **arguments)
        return cls(loaded, KEPT_BYTES if kind == "cpu" else 0)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., d] float32: what enters the target's first layer."""
        embedded = F.embedding(token_ids, self._embedding)
        if self._embedding_multiplier != 1.0:
            embedded = embedded * self._embedding_multiplier
        return embedded.float()

    def final_norm(self, last: Tensor) -> Tensor:
        """[..., d] -> [..., d] float32: what the output layer reads, of the residual stream behind the last layer."""
        return F.rms_norm(last.float(), last.shape[-1:], self.final_norm_weight, self.config.norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """[..., d] -> [..., V] float32: the target's output layer, with what its family does to logits."""
        logits = F.linear(normed.to(self._output.dtype), self._output).float()
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if self.config.final_softcap is not None:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        return logits

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, d] float32: rows of the output layer, scaled as its logits are but for a softcap."""
        return self._output[token_ids].float() / self.config.logits_divisor

    def last_layer(self) -> dict[str, Tensor]:
        """The last layer's tensors in float32, by their names within the layer."""
        prefix = f"model.layers.{len(self.config.layers) - 1}."
        names = [name for name in self._checkpoint.shapes if name.startswith(prefix)]
        return {name.removeprefix(prefix): t.float() for name, t in self._checkpoint.read(names).items()}

    def hidden_states(self, sequences: Sequence[Sequence[int]], request: HiddenStatesRequest) -> HiddenStates:
        """Hidden states of whole sequences, [B, T, d] float32 each, zeros behind a sequence's end."""
        texts = [(request, tuple(tokens)) for tokens in sequences]
        states = {text: self._kept[text] for text in texts if text in self._kept}
        unknown = [tokens for _, tokens in dict.fromkeys(texts) if (request, tokens) not in states]
        for group in _groups(unknown, self._tokens_per_pass):
            for tokens, part in zip(group, self._pass(group, request), strict=True):
                states[request, tokens] = part
                self._keep((request, tokens), part)
        parts = [states[text] for text in texts]
        stack = torch.nn.utils.rnn.pad_sequence
        last = stack([part.last for part in parts], batch_first=True).float() if request.last else None
        each_layer = zip(*(part.layer_inputs for part in parts), strict=True)
        return HiddenStates(last, tuple(stack(list(states), batch_first=True).float() for states in each_layer))

    def _pass(self, sequences: Sequence[Sequence[int]], request: HiddenStatesRequest) -> list[HiddenStates]:
        """One pass over whole sequences, each from its first token on."""
        block_size = BLOCK_SIZES[self.device.type]
        rows, next_block = [], 1
        for tokens in sequences:
            num_blocks = -(-len(tokens) // block_size)
            blocks = list(range(next_block, next_block + num_blocks))
            rows.append(RaggedRow(tokens, 0, blocks, num_logits=1, num_hidden=len(tokens)))
            next_block += num_blocks
        runner = self._runner_of(next_block - 1)
        output = runner.forward(pack(rows, block_size, self.device), hidden=request)
        # Copies, which autograd may keep: those of a pass were made in inference mode.
        last = None if output.hidden_states.last is None else output.hidden_states.last.clone()
        states = HiddenStates(last, tuple(states.clone() for states in output.hidden_states.layer_inputs))
        return states.split([len(tokens) for tokens in sequences])

    def _keep(self, text: Text, states: HiddenStates) -> None:
        """If there is room: who was here first stays, as texts come in turn and none more often than another."""
        tensors = states.layer_inputs if states.last is None else (states.last, *states.layer_inputs)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes <= self._room:
            self._kept[text] = states
            self._room -= num_bytes

    def _runner_of(self, num_blocks: int) -> ModelRunner:
        """A runner on KV of at least so many blocks, which is made anew where there are more than ever before."""
        if self._runner is None or self._runner.kv_cache.num_blocks < num_blocks:
            loaded = self.loaded
            size = BLOCK_SIZES[self.device.type]
            cache = PagedKVCache(loaded.kv_spec, num_blocks, size, loaded.kv_dtype, loaded.device)
            self._runner = ModelRunner(loaded, cache)
        return self._runner


def _groups(sequences: Sequence[tuple[int, ...]], most_tokens: int) -> list[list[tuple[int, ...]]]:
    """The sequences, in order, in groups of at most so many tokens, or of one sequence."""
    groups: list[list[tuple[int, ...]]] = []
    room = 0
    for tokens in sequences:
        if len(tokens) > room:
            groups.append([])
            room = most_tokens
        groups[-1].append(tokens)
        room -= len(tokens)
    return groups
