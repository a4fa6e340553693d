#!/usr/bin/env bash
# Sets up and runs all the tests: needs Python 3.11 or newer and a C++ compiler. Arguments go to pytest.
#
# Installs trirun and its development tools into .venv, lints, checks types, compiles every kernel for every processor
# (and, where nvcc is, for every GPU architecture: no GPU is needed for that) and runs pytest. Exits non-zero on any
# failure.
#
# PYTHON=python3.12 chooses the interpreter, CXX=clang++ the compiler, TRIRUN_CUDA=0 leaves CUDA out and
# TRIRUN_CUDA=90a,120 builds for those architectures only.
set -euo pipefail
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
export TRIRUN_CUDA=0  # for the packages built below; the CUDA library gets a step of its own
install dev
phase install true

step "Linting; checking types meanwhile"
phase lint "$venv/bin/ruff" check .
types=$(mktemp)
"$venv/bin/mypy" > "$types" 2>&1 &
checker=$!
trap 'rm -f "$types"' EXIT
# What it found, once it has ended: most of the time beside compilers that leave it half a core.
checked_types() {
  local code=0
  wait "$checker" || code=$?
  cat "$types"
  return "$code"
}

if [ "$cuda" = 0 ]; then
  step "CUDA is left out (TRIRUN_CUDA=0)"
elif ! PYTHONPATH=scripts "$venv/bin/python" -c 'import sys, trirun_toolchain as t; sys.exit(not t.find_nvcc())'; then
  step "CUDA is left out: no nvcc of a recent CUDA toolkit"
else
  step "Compiling the CUDA kernels for ${cuda:-every architecture}; kernels marked no-spill must not spill"
  phase cuda "$venv/bin/python" scripts/trirun_build.py cuda ${cuda:+--arch "$cuda"} --spills
fi

phase types checked_types
step "Testing (so far: $(printf '%s, ' "${phases[@]}" | sed 's/, $//')${failed:+; FAILED:$failed})"
"$venv/bin/python" -m pytest -q "$@" || exit
[ -z "$failed" ]
