#!/usr/bin/env bash
# Sets up and runs all the tests: needs Python 3.11 or newer and a C++ compiler. Arguments go to pytest.
#
# Installs trirun and its development tools into .venv, lints, checks types, compiles every kernel for every processor
# (and, where nvcc is, for every GPU architecture: no GPU is needed for that) and runs pytest. Exits non-zero on any
# failure.
#
# --sanitize instead runs the CPU library's tests under ASan and UBSan, and those of its threads under TSan
# (scripts/sanitize_cpu.py).
#
# PYTHON=python3.12 chooses the interpreter, CXX=clang++ the compiler, TRIRUN_CUDA=0 leaves CUDA out and
# TRIRUN_CUDA=90a,120 builds for those architectures only.
set -euo pipefail
# Bytecode is made when a module is imported first, and kept: most modules of what is installed never are.
unset PYTHONDONTWRITEBYTECODE
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

phases=()
started=$SECONDS
failed=
# phase NAME COMMAND...: a failure is remembered, and the rest still runs.
phase() {
  "${@:2}" || failed+=" $1"
  phases+=("$1 $((SECONDS - started)) s")
  started=$SECONDS
}

cuda=${TRIRUN_CUDA-}
if [ "${1-}" = --sanitize ]; then cuda=0; fi
export TRIRUN_CUDA=0  # for the packages built below; the CUDA library gets a step of its own

logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
# What a background command said and whether it succeeded, once it has ended: outcome NAME PROCESS.
outcome() {
  local code=0
  wait "$2" || code=$?
  cat "$logs/$1"
  return "$code"
}

has_nvcc() { PYTHONPATH=scripts "$1" -c 'import sys, trirun_toolchain as t; sys.exit(not t.find_nvcc())'; }
compile_cuda=(scripts/trirun_build.py cuda ${cuda:+--arch "$cuda"} --spills)
compiler=
# It needs nothing of what is installed below, and a download leaves it the processor.
if [ "$cuda" != 0 ] && python=$(find_python 2>/dev/null) && has_nvcc "$python"; then
  "$python" "${compile_cuda[@]}" >"$logs/cuda" 2>&1 &
  compiler=$!
fi

install dev --no-compile
phase install true
if [ "${1-}" = --sanitize ]; then
  phase address "$venv/bin/python" scripts/sanitize_cpu.py address
  phase thread "$venv/bin/python" scripts/sanitize_cpu.py thread
  step "Sanitizers: $(printf '%s, ' "${phases[@]}" | sed 's/, $//')${failed:+; FAILED:$failed}"
  [ -z "$failed" ]
  exit
fi

step "Linting; checking types meanwhile"
lint() {
  "$venv/bin/ruff" check . && "$venv/bin/ruff" format --check --quiet . &&
    git ls-files -z '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -0 "$venv/bin/clang-format" --dry-run --Werror
}
phase lint lint
"$venv/bin/mypy" >"$logs/types" 2>&1 &
checker=$!

if [ "$cuda" = 0 ]; then
  step "CUDA is left out (TRIRUN_CUDA=0)"
elif [ -z "$compiler" ] && ! has_nvcc "$venv/bin/python"; then
  step "CUDA is left out: no nvcc of a recent CUDA toolkit"
else
  step "Compiling the CUDA kernels for ${cuda:-every architecture}; kernels marked no-spill must not spill"
  if [ -z "$compiler" ]; then
    phase cuda "$venv/bin/python" "${compile_cuda[@]}"
  else
    phase cuda outcome cuda "$compiler"
  fi
fi

phase types outcome types "$checker"
step "Testing (so far: $(printf '%s, ' "${phases[@]}" | sed 's/, $//')${failed:+; FAILED:$failed})"
# A file of tests stays in one process: its fixtures are made once. Files are in the order of tests/conftest.py, not of
# their numbers of tests: some of one test take half a minute.
# Threads of OpenMP that wait for each other leave the processor to other tests: spinning, two tests side by side on two
# cores took 570 s in place of 7.
export OMP_WAIT_POLICY=passive
"$venv/bin/python" -m pytest -q --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@" || exit
[ -z "$failed" ]
