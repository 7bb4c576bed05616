"""Peers on made-up speeds, and contenders that only say what they were asked."""

from benchmarks.cpu_peers.cell import play, summary


class Scripted:
    """Decodes by counting on from a prompt's last token, at a given speed in each of its turns."""

    def __init__(self, name, speeds, shift, log):
        self.name, self.speeds, self.shift, self.log = name, iter(speeds), shift, log

    def decode(self, prompts, batch_size, output_len):
        self.log.append((self.name, len(prompts)))
        outputs = [[prompt[-1] + self.shift + i for i in range(output_len)] for prompt in prompts]
        return outputs, sum(map(len, prompts if output_len == 1 else outputs)) / next(self.speeds)


def test_the_best_plain_peer_is_beside_plain_and_the_best_of_all_beside_speculative():
    found = summary({
        "ours": [100, 110, 90], "ours speculative": [120, 132, 108], "A": [80, 80, 80], "B": [50, 55, 45],
        "A speculative": [20, 20, 20], "B speculative": [160, 176, 144],
    })  # fmt: skip
    best = found["over_the_best_peer"]
    assert best["ours"] == {"peer": "A", "ratio": [1.25, 1.125, 1.375]}
    assert best["ours speculative"] == {"peer": "B speculative", "ratio": [0.75, 0.75, 0.75]}
    assert found["over_ours"]["B"] == 0.5
    assert found["tokens_per_second"]["ours"] == [100, 90, 110]


def test_ours_alone_has_nobody_beside_it():
    assert summary({"ours": [3.0]})["over_the_best_peer"] == {}


def test_contenders_take_turns_and_a_first_batch_is_not_timed():
    log = []
    ours, other = Scripted("ours", [1, 10, 20], 1, log), Scripted("A", [1, 5, 20], 1, log)
    found = play([ours, other], [[[7], [8]], [[9], [10]]], batch_size=1, output_len=4)
    assert log == [("ours", 1), ("A", 1), ("ours", 2), ("A", 2), ("A", 2), ("ours", 2)]
    assert found["tokens_per_second"] == {"ours": [15, 10, 20], "A": [12.5, 5, 20]}
    assert found["over_ours"]["A"] == 0.75


def test_outputs_are_compared_with_ours():
    log = []
    found = play([Scripted("ours", [1, 1], 1, log), Scripted("A", [1, 1], 2, log)], [[[7]]], 1, 4)
    assert found["equal_outputs"] == {"ours": "1/1", "A": "0/1"}


def test_where_one_token_comes_out_speed_is_that_of_prompts():
    found = play([Scripted("ours", [1, 30], 1, [])], [[[1, 2, 3]]], 1, 1)
    assert found["tokens_per_second"]["ours"] == [30, 30, 30]
