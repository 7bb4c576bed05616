"""Realignment as the literature has it: dense, left-padded batches behind the engine's KVLayout, and EQSPEC's and
EXSPEC's batches behind its Scheduler. The engine knows neither: whoever builds one hands them in."""
