"""vLLM's executor of worker processes, but for its question for drafts after every step: they come with its output."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from typing_extensions import override
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds

from specpaged.vllm_plugin.outputs import StepOutput


class DraftingExecutor(MultiprocExecutor):
    """`--distributed-executor-backend mp` where our worker drafts: one call between processes less in each step.

    For synchronous scheduling, which asks for a step's drafts when it has its output, and before the next step.
    """

    _output: Any = None  # of the last step, or its future

    @override
    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        self._output = super().execute_model(*arguments, **options)
        return self._output

    @override
    def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        self._output = super().sample_tokens(*arguments, **options)
        return self._output

    @override
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        output = self._output.result() if isinstance(self._output, Future) else self._output
        return output.drafts if isinstance(output, StepOutput) else None
