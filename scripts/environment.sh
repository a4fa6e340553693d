# Sourced by quickstart.sh and test.sh: a virtual environment in .venv with trirun installed from this checkout.
#
#   PYTHON   the interpreter to make it with (3.11 or newer); otherwise the first suitable one on PATH
#   CXX      the C++ compiler; otherwise g++

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
cd "$root"

step() { printf '\n==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$1" >&2; shift; if [ $# -gt 0 ]; then printf '  %s\n' "$@" >&2; fi; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  fail "no Python 3.11 or newer on PATH" "install one, or set PYTHON to it"
}

# Everything an installation depends on: when this stays the same, there is nothing to install.
fingerprint() {
  {
    echo "$1 ${TRIRUN_CUDA-all} ${CXX:-g++}"
    "$venv/bin/python" --version
    cat pyproject.toml scripts/constraints.txt
    find kernels/csrc scripts -type f -name '*.[chpm]*' ! -path '*/__pycache__/*' -exec cksum {} + | sort
  } | cksum
}

# install EXTRAS [PIP-OPTION...]: make the environment if there is none, and bring it up to date if something changed.
install() {
  local python stamp=$venv/installed-${1:-base} spec=.${1:+[$1]}
  command -v "${CXX:-g++}" >/dev/null ||
    fail "no C++ compiler: ${CXX:-g++} is not on PATH" "install one (the package is called g++ or gcc-c++), or set CXX"
  if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    step "Making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv "$venv" || {
      rm -rf "$venv"
      fail "$python cannot make virtual environments" "install its venv module (the package is called python3-venv)"
    }
  fi
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "${1:-}")" ] &&
    [ -f kernels/trirun_kernels/_lib/libtrirun_cpu.so ]; then
    step "trirun is installed in .venv, and nothing changed since"
    return
  fi
  local torch pip=("$venv/bin/python" -m pip install --disable-pip-version-check -c scripts/constraints.txt "${@:2}")
  torch=$(grep '^torch==' scripts/constraints.txt)
  if ! "$venv/bin/python" 2>/dev/null \
    -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '${torch#*==}'"; then
    step "Installing $torch into .venv (0.2 GB as the CPU build, several GB as the CUDA build: scripts/constraints.txt)"
    "${pip[@]}" "$torch"
  fi
  step "Compiling the kernels and installing trirun into .venv"
  "${pip[@]}" --quiet -e "$spec"
  fingerprint "${1:-}" >"$stamp"
}
