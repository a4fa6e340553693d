"""Registers and spills of every CUDA kernel, from what ptxas said when it was compiled.

A kernel that must live in registers is named beside its code, in a .cu file or a header it includes::

    // no-spill: int2_decode<8, *>
    // no-spill(90a): int2_prefill<128, *>

The pattern (``*`` and ``?``) is looked for in the kernel's demangled name, on all architectures or on those listed.
Such a kernel fails the report if it spills or has a stack frame; a pattern that names no kernel fails it too.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trirun_compile import Tree, compiler_logs, included
from trirun_toolchain import BuildError

_MARK = re.compile(r"//\s*no-spill(?:\(([^)]*)\))?:\s*(.+?)\s*$", re.MULTILINE)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for 'sm_(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes on one architecture; sizes in bytes per thread, ``shared`` (static) per CTA."""

    name: str
    symbol: str
    arch: str
    registers: int
    stack: int
    spills: int
    shared: int

    @property
    def clean(self) -> bool:
        return self.stack == self.spills == 0

    @property
    def cell(self) -> str:
        return f"{self.registers}" if self.clean else f"{self.registers}+{self.stack}+{self.spills}"


@dataclass(frozen=True, slots=True)
class Mark:
    """A ``no-spill`` line: a pattern and the architectures it holds for (none: all)."""

    pattern: str
    archs: tuple[str, ...]

    def covers(self, usage: Usage) -> bool:
        wanted = not self.archs or usage.arch in self.archs
        return wanted and fnmatch.fnmatchcase(usage.name, f"*{self.pattern}*")


def spill_report(tree: Tree) -> tuple[str, bool]:
    """A table of the CUDA library's kernels as built last, and whether a ``no-spill`` line is broken."""
    usages: list[Usage] = []
    marks: list[Mark] = []
    for source, log in compiler_logs(tree, "cuda").items():
        usages += parse_usage(log)
        for path in included(tree, source):
            marks += parse_marks(path)
    archs = sorted({usage.arch for usage in usages}, key=lambda arch: int(arch.rstrip("af")))
    lines = ["registers per thread, + bytes of stack and spills where there are any"]
    lines.append("".join(f"{'sm_' + arch:>13}" for arch in archs) + "  kernel")
    for name in sorted({usage.name for usage in usages}):
        cells = {usage.arch: usage for usage in usages if usage.name == name}
        marked = any(mark.covers(usage) for mark in marks for usage in cells.values())
        row = "".join(f"{cells[arch].cell if arch in cells else '-':>13}" for arch in archs)
        lines.append(f"{row}  {name}{'  (no-spill)' if marked else ''}")
    built = {usage.arch for usage in usages}
    broken = [u for u in usages if not u.clean and any(mark.covers(u) for mark in marks)]
    stale = [
        mark
        for mark in dict.fromkeys(marks)
        # A mark for an architecture that was not built now says nothing.
        if (not mark.archs or built & set(mark.archs)) and not any(mark.covers(usage) for usage in usages)
    ]
    lines += [f"BROKEN: {u.name} on sm_{u.arch}: {u.stack} bytes of stack, {u.spills} of spills" for u in broken]
    lines += [f"STALE: no-spill: {mark.pattern}: names no kernel" for mark in stale]
    lines.append(f"{len(usages)} kernels, {len(set(marks))} no-spill lines, {len(broken)} broken, {len(stale)} stale")
    return "\n".join(lines), bool(broken or stale)


def parse_usage(log: str) -> list[Usage]:
    """The kernels in a log of ``ptxas -v``."""
    found = list(_ENTRY.finditer(log))
    names = demangle([entry["name"] for entry in found])
    return [
        Usage(
            name,
            m["name"],
            m["arch"],
            int(m["registers"]),
            int(m["stack"]),
            int(m["stores"]) + int(m["loads"]),
            int(m["shared"] or 0),
        )
        for name, m in zip(names, found, strict=True)
    ]


def parse_marks(path: Path) -> list[Mark]:
    """The ``no-spill`` lines of a source file."""
    return [Mark(m[2], tuple(re.split(r"[,\s]+", m[1])) if m[1] else ()) for m in _MARK.finditer(path.read_text())]


def demangle(names: list[str]) -> list[str]:
    """C++ names as they stand in the source, without parameter lists."""
    if shutil.which("c++filt") is None:
        raise BuildError("c++filt is not on PATH; it comes with binutils")
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [line.removeprefix("void ").replace("(anonymous namespace)::", "") for line in done.stdout.splitlines()]
