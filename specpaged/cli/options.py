"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpaged.config import ATTENTION_BACKENDS, DRAFT_KV_DTYPES, DTYPES, MODEL_IMPLS, NUMERICS
from specpaged.speculative_config import METHODS

Model = Annotated[str | None, typer.Option(help="Target: local path or hub id. Default: the embedded pair.")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to complete.")]
DraftModel = Annotated[str | None, typer.Option(help="Draft: local path or hub id.")]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"Who drafts, one of {', '.join(METHODS)}, or several, with commas between them; ngram, suffix and custom "
        "need no draft model. Default: draft_model."
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="What LLM(speculative_config=...) takes, as vLLM spells it: any of its keys that no other option says, "
        """such as '{"method": ["suffix", "eagle3"], "model": "DIR", "suffix_decoding_max_spec_factor": 2.0}'.""",
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(help="Of --method custom, who drafts: package.module:Class, on Python's path. See docs/drafters.md."),
]
Prompts = Annotated[str | None, typer.Option(help="JSON lines in Spec-Bench form; - reads standard input.")]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="An evenly spread selection of the prompts.")]
MaxPromptTokens = Annotated[int | None, typer.Option(min=1, help="Clip longer prompts; default: what fits.")]
K = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        min=0,
        help="Draft tokens per round; 0: plain decoding. Default: decided in every step.",
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences in a batch.")]
MaxModelLen = Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and output. Default: the model's.")]
KVCacheMemory = Annotated[
    int | None, typer.Option("--kv-cache-memory-bytes", min=1, help="Of both pools. Default: at most 1 GiB on a CPU.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of sampled output; prompt i uses seed + i.")]
DType = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
KVCacheDType = Annotated[
    str, typer.Option(help=f"What the target's keys and values are stored as: one of {', '.join(DTYPES)}.")
]
DraftKVCacheDType = Annotated[
    str, typer.Option(help=f"The same of the draft model: one of {', '.join(DRAFT_KV_DTYPES)}.")
]
DraftKVMemory = Annotated[
    int | None,
    typer.Option("--draft-kv-cache-memory-bytes", min=1, help="Of a pool of the draft's own, out of both pools'."),
]
DraftKVWindow = Annotated[int | None, typer.Option(help="Tokens of a sequence that the draft reads. Default: all.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(min=1, help="Rows of a pass at most. Default: 2048.")]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a block. Default: 16, on a GPU 64.")]
Numerics = Annotated[str, typer.Option(help=f"One of {', '.join(NUMERICS)}.")]
AttentionBackend = Annotated[str, typer.Option(help=f"One of {', '.join(ATTENTION_BACKENDS)}.")]
ModelImpl = Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_IMPLS)}.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Schedule = Annotated[
    str,
    typer.Option(
        help="continuous: drafts behind the target; overlap: of one half of the batch while the target runs the other; "
        "auto: the quicker of the two, as measured meanwhile."
    ),
]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda[:index]'.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of a pass. Default: torch's choice.")]
Output = Annotated[Path | None, typer.Option(help="Write the completions as JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="End in one line of JSON.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run model code that a checkpoint brings along.")]
