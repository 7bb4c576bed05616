"""One run on a machine with a GPU: kernels against references, bandwidth, rollback, exactness."""
