"""Figures of the paper that the studies stand beside: arXiv 2510.22876, on an A100 with fp16 and K = 5."""

# Outputs equal to those of plain decoding, %, by method and B: of Vicuna-7B/68M, Qwen3-8B/0.6B, GLM-4-9B/0.6B.
EXACT_MATCH = {
    ("plain", 4): (53.8, 92.9, 93.3),
    ("eqspec", 1): (97.3, 94.6, 96.7),
    ("eqspec", 4): (92.1, 92.3, 96.5),
    ("exspec", 1): (97.3, 94.6, 96.7),
    ("exspec", 4): (90.8, 95.0, 95.2),
}
# Of EXSPEC's rounds those whose sequences had one length, %, by B.
GROUPING = {
    "random": {2: 23.6, 4: 17.5, 8: 4.8, 16: 1.3, 32: 0.0},
    "equal": {2: 95.9, 4: 89.3, 8: 84.1, 16: 70.7, 32: 44.2},
}
# Realignment's share of EQSPEC's time, %, by B.
REALIGNMENT_SHARE = {1: "13", 16: "38-47", 32: "38-47"}
# Shares of time of verify, draft and overhead at B = 4 (Vicuna), %, and tokens per second.
SHARES = {"eqspec": (44.9, 27.4, 27.7), "exspec": (55.9, 29.5, 14.6)}
TOKENS_PER_SECOND = {"eqspec": 95.6, "exspec": 156.4}
