"""Tokens per second of the same prompts, decoded by ourselves and by transformers, at B = 1, 8, 32, 128; and by K."""

import pytest

from benchmarks.ceiling import forward_seconds
from benchmarks.contenders import NUM_DRAFTS, OUTPUT_LEN, PLAIN_EXACT, SPECULATIVE_EXACT, Field, sample_prompts
from benchmarks.k_sweep import KSweep
from benchmarks.peers import missing_for_generate_batch
from benchmarks.rounds import Rounds

WAVES = {1: 4, 8: 2, 32: 1, 128: 1}  # full batches of prompts in a round
ROUNDS = {1: 5, 8: 5, 32: 3, 128: 2}
BATCH_SIZES = pytest.mark.parametrize("batch_size", list(WAVES), ids="B{}".format)


@pytest.fixture(scope="module")
def field(threads):
    missing = missing_for_generate_batch()
    if missing:
        print(f"\n{missing}")
    return Field()


@pytest.mark.benchmark(group="a round of all contenders")
@BATCH_SIZES
def test_throughput(benchmark, field, results, pytestconfig, batch_size):
    num_rounds = pytestconfig.getoption("--rounds") or ROUNDS[batch_size]
    prompts_per_round = batch_size * (pytestconfig.getoption("--waves") or WAVES[batch_size])
    pool = sample_prompts(num_rounds * prompts_per_round)
    contenders = field.at(batch_size)
    for contender in contenders:
        contender.prepare(batch_size)
        contender.run(pool[:batch_size], batch_size)  # warms up
    rounds = Rounds(contenders, pool, prompts_per_round, batch_size)
    benchmark.pedantic(rounds.play, rounds=num_rounds, iterations=1)
    rounds.check_equal_work(OUTPUT_LEN)

    # Half of the output long, a sequence has the run's typical context.
    outputs = rounds.rounds[0][PLAIN_EXACT].token_ids[:batch_size]
    sequences = [[*prompt, *output] for prompt, output in zip(rounds.prompts(0), outputs, strict=False)]
    forward, beside_roofs = forward_seconds(
        [c for c in contenders if c.name in (SPECULATIVE_EXACT, "speculative fast")],
        sequences,
        [len(sequence) - OUTPUT_LEN // 2 for sequence in sequences],
        sorted({1, 2, 3, 4, 5, NUM_DRAFTS + 1}),
    )
    summary = rounds.summary(forward) | {"target_passes": beside_roofs}
    results.setdefault("throughput", {})[str(batch_size)] = summary


@pytest.mark.benchmark(group="a round of every K")
@BATCH_SIZES
def test_k_sweep(benchmark, threads, results, pytestconfig, batch_size):
    num_rounds = pytestconfig.getoption("--rounds") or (3 if batch_size < 128 else 2)
    prompts_per_round = batch_size * (pytestconfig.getoption("--waves") or WAVES[batch_size])
    sweep = KSweep(sample_prompts(prompts_per_round), batch_size)
    benchmark.pedantic(sweep.play, rounds=num_rounds, iterations=1)
    results.setdefault("k_sweep", {})[str(batch_size)] = sweep.summary()
