"""Random Gated DeltaNet layers, and what their references make of them."""

from __future__ import annotations

import torch
from trirun_kernels.decoder.delta_reference import DeltaState, delta_layer

TAPS = 4


class RandomLayer:
    """Parameters of a layer, float32 tensors on the CPU.

    Args:
        sizes: key heads, value heads, key_dim, value_dim.
    """

    def __init__(self, sizes, *, hidden=64, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = sizes
        self.hidden, self.eps = hidden, 1e-6
        self.keys, self.values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.channels = 2 * self.keys + self.values
        self.gate_weight = self.draw(2 * self.value_heads, hidden) * hidden**-0.5
        self.conv = self.draw(TAPS, self.channels) * 0.5
        # Decays from a few tokens to hundreds of them, as those of trained models.
        self.decay_rate = -torch.rand(self.value_heads, generator=self.generator).mul(6).sub(4).exp()
        self.decay_bias = self.draw(self.value_heads)
        self.norm = 1 + 0.1 * self.draw(self.value_dim)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def fresh(self):
        """Of a sequence that has no token yet."""
        state = torch.zeros(self.value_heads, self.key_dim, self.value_dim)
        return DeltaState(state, torch.zeros(TAPS - 1, self.channels))

    def expected(self, rows, kept):
        """The reference on rows of :meth:`rows` of one sequence, which goes on from what is kept."""
        qkv, z, hidden = (part.float().cpu() for part in rows)
        b, a = (hidden @ self.gate_weight.T).split(self.value_heads, 1)
        return delta_layer(
            qkv, z, b, a, conv=self.conv, decay_rate=self.decay_rate, decay_bias=self.decay_bias, norm=self.norm,
            eps=self.eps, key_heads=self.key_heads, kept=kept,
        )  # fmt: skip

    def rows(self, m):
        """q|k|v [m, channels], z [m, values] and the layer's input [m, hidden]."""
        return self.draw(m, self.channels), self.draw(m, self.values), self.draw(m, self.hidden)

    def by_head(self, qkv, z):
        """q|k|v and z as one projection that has them key head after key head."""
        parts = qkv.split((self.keys, self.keys, self.values), 1)
        return torch.cat([part.unflatten(1, (self.key_heads, -1)) for part in (*parts, z)], 2).flatten(1)
