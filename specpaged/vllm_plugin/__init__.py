"""specpaged as a worker of vLLM: `vllm serve MODEL --worker-cls specpaged.vllm_plugin.worker.SpecPagedWorker`.

vLLM keeps its API, scheduler, prefix cache and executors, and owns the blocks; models, drafter, verification and KV
caches are those of specpaged. This is the only package that imports vllm.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("specpaged")

WORKER_CLS = "specpaged.vllm_plugin.worker.SpecPagedWorker"


def register() -> None:
    """vLLM's entry point "vllm.general_plugins": called in each of its processes, once or more often.

    Without our worker in a configuration nothing changes. With it, requests are checked at admission for what it
    cannot do. Who has not asked for our worker must not hear more of us than a line: whatever fails is logged, under a
    version of vLLM that we do not know nothing of it is touched, and the worker itself says so when it is made.
    """
    try:
        import vllm

        from specpaged.vllm_plugin.compat import check_version

        check_version(vllm.__version__)
        from specpaged.vllm_plugin.admission import add_to_configurations

        add_to_configurations()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("specpaged's worker cannot be used here: %s", reason)
