"""What 16-bit training gains, on one hidden layer: losses, time and memory of a step in five precisions.

    python scripts/mixed_precision.py [--modes fp32,tf32,fp16,bf16,f16acc] [--batch 8192] [--hidden 8192] [--steps 50]
                                      [--device auto] [--mnist DIR] [--json]

An MLP 784 → hidden → 10 with ReLU and cross-entropy, plain SGD, forward and backward written out so that every tensor
can be counted (the idea, the network and its batch of 8192 are mixed-precision-from-scratch's):

  fp32    everything in float32, multiplied without TF32
  tf32    the same tensors, multiplied on tensor cores with 10 bits of mantissa
  fp16    weights, activations and gradients in float16; float32 masters take the updates; dynamic loss scaling
  bf16    the same in bfloat16, whose exponents need no loss scaling
  f16acc  fp16, every product by trirun's f16acc_gemm (fp16 sums inside chunks of k, fp32 across them)

All modes start from the same weights and see the same batches: MNIST's where --mnist names a folder with
train-images-idx3-ubyte and train-labels-idx1-ubyte (.gz or not), else ten noisy prototypes. On a CPU the defaults are
small. Times are medians over steps (CUDA events), memory is in MB of 10^6 bytes; peak is torch's allocator's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from trirun_kernels.f16acc.ops import f16acc_gemm

PIXELS, CLASSES = 784, 10
WARM_UP = 5  # steps without timing


@dataclass(frozen=True, slots=True)
class Mode:
    """A precision: ``dtype`` of weights, activations and gradients, and what else it takes."""

    dtype: torch.dtype
    tf32: bool = False
    scaled: bool = False
    f16acc: bool = False

    @property
    def masters(self) -> bool:
        return self.dtype != torch.float32


MODES = {
    "fp32": Mode(torch.float32),
    "tf32": Mode(torch.float32, tf32=True),
    "fp16": Mode(torch.float16, scaled=True),
    "bf16": Mode(torch.bfloat16),
    "f16acc": Mode(torch.float16, scaled=True, f16acc=True),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One mode. Bytes by what they hold; ``peak`` is 0 where it cannot be measured; ``skipped`` steps overflowed."""

    mode: str
    losses: list[float]
    ms_per_step: float
    weights: int
    masters: int
    activations: int
    gradients: int
    peak: int
    skipped: int


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): halved when a gradient overflows, doubled after a long calm.

    All of it stays on the device: a step that asked the host whether its gradients are finite would leave the GPU idle
    until the answer had come back and the next step's first kernel had been sent.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16, calm: int = 200) -> None:
        self.calm = calm
        self.value = torch.tensor(start, device=device)
        self.good, self.skipped = torch.zeros((2,), dtype=torch.int64, device=device).unbind()

    def accepts(self, gradients: list[Tensor]) -> Tensor:
        """Whether the gradients are finite and the step may be taken: bool, one element, on the device."""
        # One sum per gradient finds infinities and NaNs.
        finite = torch.stack([g.sum(dtype=torch.float32) for g in gradients]).isfinite().all()
        self.good = (self.good + 1) * finite
        self.skipped = self.skipped + ~finite
        grown = torch.where(self.good % self.calm == 0, 2.0, 1.0)
        self.value = self.value * torch.where(finite, grown, 0.5)
        return finite


class Trainer:
    """The network in one precision, and a step of training."""

    def __init__(self, mode: Mode, start: list[Tensor], lr: float) -> None:
        self.mode, self.lr = mode, lr
        self.scale = LossScale(start[0].device, 2.0**16 if mode.scaled else 1.0)
        self.masters = [p.clone() for p in start] if mode.masters else []
        self.weights = [p.to(mode.dtype) if mode.masters else p.clone() for p in start]
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a [m, k] · b [n, k]ᵀ (+ bias [n])."""
        return f16acc_gemm(a, b, bias) if self.mode.f16acc else F.linear(a, b, bias)

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        """One batch: x [batch, 784] in the mode's dtype, labels [batch]. Returns the loss, float32 on the device."""
        w1, b1, w2, b2 = self.weights
        hidden = self.product(x, w1, b1).relu_()  # also says where ReLU let through: no second copy is kept
        logits = self.product(hidden, w2, b2)
        log_p = logits.float().log_softmax(1)
        loss = F.nll_loss(log_p, labels)

        # The scale enters with the first gradient and so reaches all of them.
        error = log_p.exp_()
        error[torch.arange(len(labels), device=x.device), labels] -= 1
        d_logits = (error * (self.scale.value / len(labels))).to(x.dtype)
        d_w2, d_b2 = self.product(d_logits.t(), hidden.t()), d_logits.sum(0)
        d_hidden = self.product(d_logits, w2.t())
        torch.ops.aten.threshold_backward(d_hidden, hidden, 0, grad_input=d_hidden)
        d_w1, d_b1 = self.product(d_hidden.t(), x.t()), d_hidden.sum(0)

        gradients = [d_w1, d_b1, d_w2, d_b2]
        self.activations, self.gradients = [x, hidden, logits], [d_logits, d_hidden, *gradients]
        self.update(gradients)
        return loss

    def update(self, gradients: list[Tensor]) -> None:
        """SGD on the masters where there are any; the weights follow, rounded. A step that overflowed adds zeros."""
        if not self.mode.masters:
            torch._foreach_add_(self.weights, gradients, alpha=-self.lr)
            return
        if self.mode.scaled:
            step = -self.lr / self.scale.value
            overflow = self.scale.accepts(gradients).logical_not()
        for master, weight, gradient in zip(self.masters, self.weights, gradients, strict=True):
            # A small update would be lost in 16 bits; float16 + float32 adds in float32, with no copy in between.
            if self.mode.scaled:
                master.addcmul_(gradient.masked_fill_(overflow, 0), step)
            else:
                master.add_(gradient, alpha=-self.lr)
            weight.copy_(master)


def run(name: str, batches: list[tuple[Tensor, Tensor]], start: list[Tensor], steps: int, lr: float) -> Result:
    """Train in one mode for ``steps`` steps over the batches in turn, and measure."""
    mode, device = MODES[name], start[0].device
    cuda = device.type == "cuda"
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if mode.tf32 else "highest")
    try:
        data = [(x.to(mode.dtype), labels) for x, labels in batches]
        before = torch.cuda.memory_allocated(device) if cuda else 0
        trainer = Trainer(mode, start, lr)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        losses, times = [], []
        for i in range(steps):
            # What a step keeps for counting must not add to the next one's peak.
            trainer.activations, trainer.gradients = [], []
            begin = _mark(cuda)
            loss = trainer.step(*data[i % len(data)])
            times.append((begin, _mark(cuda)))
            losses.append(loss)
        ms = [_milliseconds(*pair) for pair in times[min(WARM_UP, steps - 1) :]]
        peak = torch.cuda.max_memory_allocated(device) - before + _bytes(data[0][:1]) if cuda else 0
        return Result(
            name, torch.stack(losses).tolist(), statistics.median(ms), _bytes(trainer.weights), _bytes(trainer.masters),
            _bytes(trainer.activations), _bytes(trainer.gradients), peak, int(trainer.scale.skipped),
        )  # fmt: skip
    finally:
        torch.set_float32_matmul_precision(precision)


def _mark(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begin, end) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e3
    end.synchronize()
    return begin.elapsed_time(end)


def _bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def start_weights(hidden: int, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """W1 [hidden, 784], b1, W2 [10, hidden], b2: uniform within ±1/√inputs, float32."""
    shapes = [((hidden, PIXELS), PIXELS), ((hidden,), PIXELS), ((CLASSES, hidden), hidden), ((CLASSES,), hidden)]
    return [((torch.rand(shape, generator=generator) * 2 - 1) / inputs**0.5).to(device) for shape, inputs in shapes]


def prototypes(batch: int, count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ten classes: a fixed random image each, under noise of the same size. x [batch, 784] in float32."""
    centers = torch.randn(CLASSES, PIXELS, generator=generator)
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (batch,), generator=generator)
        yield (centers[labels] + torch.randn(batch, PIXELS, generator=generator)) / 2, labels


def mnist(folder: Path, batch: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first ``count`` batches of the training set, pixels in -1..1; fewer where the set ends before."""
    pixels = _idx(folder, "train-images-idx3-ubyte", 16).view(-1, PIXELS)
    labels = _idx(folder, "train-labels-idx1-ubyte", 8).long()
    for i in range(min(count, len(labels) // batch)):
        part = slice(i * batch, (i + 1) * batch)
        yield pixels[part].float() / 127.5 - 1, labels[part]


def _idx(folder: Path, name: str, header: int) -> Tensor:
    packed = folder / f"{name}.gz"
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)


def table(results: list[Result]) -> str:
    """Markdown: time and memory of each mode, also as multiples of the first one's, and how far its losses stray."""
    first, mb = results[0], 1e6
    lines = [
        f"| mode | ms/step | × {first.mode} | weights | masters | activations | gradients | peak MB | × {first.mode} "
        "| last loss | largest loss difference | skipped |",
        "|---|" + "--:|" * 11,
    ]
    for r in results:
        stray = max(abs(a - b) for a, b in zip(r.losses, first.losses, strict=True))
        whole = f"{r.peak / mb:.0f} | {r.peak / first.peak:.2f}" if first.peak else "– | –"
        lines.append(
            f"| {r.mode} | {r.ms_per_step:.3f} | {first.ms_per_step / r.ms_per_step:.2f} | {r.weights / mb:.1f} | "
            f"{r.masters / mb:.1f} | {r.activations / mb:.1f} | {r.gradients / mb:.1f} | {whole} | "
            f"{r.losses[-1]:.4f} | {stray:.4f} | {r.skipped} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, help="rows of a batch [8192; 32 on a CPU]")
    parser.add_argument("--hidden", type=int, help="units of the hidden layer [8192; 64 on a CPU]")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu or cuda")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder of MNIST's training files")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args(arguments)
    names = options.modes.split(",")
    if unknown := set(names) - MODES.keys():
        parser.error(f"--modes {','.join(sorted(unknown))}: {', '.join(MODES)}")
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    batch = options.batch or (8192 if device.type == "cuda" else 32)
    hidden = options.hidden or (8192 if device.type == "cuda" else 64)
    if min(batch, hidden, options.steps) < 1:
        parser.error("--batch, --hidden and --steps must be positive")
    generator = torch.Generator().manual_seed(options.seed)
    count = min(options.steps, 7)  # MNIST has seven batches of 8192; the same few are seen again and again
    source = mnist(options.mnist, batch, count) if options.mnist else prototypes(batch, count, generator)
    batches = [(x.to(device), labels.to(device)) for x, labels in source]
    if not batches:
        parser.error(f"--batch {batch}: more than {options.mnist} holds")
    start = start_weights(hidden, device, generator)
    results = [run(name, batches, start, options.steps, options.lr) for name in names]
    if options.json:
        facts = {"device": str(device), "torch": torch.__version__, "batch": batch, "hidden": hidden}
        print(json.dumps({**facts, "results": [asdict(r) for r in results]}))
        return 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {PIXELS} → {hidden} → {CLASSES}, batch {batch}, {options.steps} steps\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
