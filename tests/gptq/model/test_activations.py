"""Calibration text in batches."""

import torch
from trirun_gptq.model.activations import make_batches


def test_batches_are_of_nearly_one_size_and_one_length():
    sequences = [torch.full((1024,), i) for i in range(9)] + [torch.full((9000,), 9), torch.full((1024,), 10)]
    batches = make_batches(sequences, first=5)
    assert [(first, tuple(tokens.shape)) for first, tokens in batches] == [
        (5, (3, 1024)),
        (8, (3, 1024)),
        (11, (3, 1024)),
        (14, (1, 9000)),
        (15, (1, 1024)),
    ]
    assert [int(row[0]) for _, tokens in batches for row in tokens] == list(range(11))
