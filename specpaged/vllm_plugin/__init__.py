"""specpaged as a worker of vLLM: `vllm serve MODEL --worker-cls specpaged.vllm_plugin.worker.SpecPagedWorker`.

vLLM keeps its API, scheduler, prefix cache and executors, and owns the blocks; models, drafter, verification and KV
caches are those of specpaged. This is the only package that imports vllm.
"""

from __future__ import annotations

WORKER_CLS = "specpaged.vllm_plugin.worker.SpecPagedWorker"


def register() -> None:
    """vLLM's entry point "vllm.general_plugins": called in each of its processes, once or more often.

    Without our worker in a configuration nothing changes. With it, requests are checked at admission for what it
    cannot do.
    """
    from specpaged.vllm_plugin.admission import add_to_configurations

    add_to_configurations()
