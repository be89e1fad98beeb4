#!/bin/sh
# The steps of the Dockerfile:
#   install.sh system | libraries | torch cpu|cu130|cu126 | cuadrilla
set -eu
here=/opt/build
pip() { /opt/venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }

case $1 in
system)
  packages="ca-certificates git iputils-ping tini"
  command -v python3 >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3 python3-venv"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
  rm -rf /var/lib/apt/lists/*
  # Docker lets everybody ping, without a right of the file's own; with `cap_drop` such a file could not even be started.
  chmod u-s "$(command -v ping)"
  ! command -v setcap >/dev/null || setcap -r "$(command -v ping)" 2>/dev/null || true
  getent passwd 1000 >/dev/null || useradd --uid 1000 --no-create-home --home-dir "$HOME" --shell /bin/bash cuadrilla
  # A new volume takes the mode of its folder here; whose it is follows from the folder at /workspace.
  install -d -m 1777 "$HOME" "$CUADRILLA_HOME" /crew /monitor /ray /serve
  install -d -m 1777 -o 1000 -g 1000 /workspace
  # /etc/profile sets PATH anew; it reads this afterwards.
  echo 'PATH=/opt/venv/bin:$PATH' >/etc/profile.d/venv.sh
  python3 -m venv /opt/venv
  ;;
libraries)
  pip install --no-cache-dir -q --require-hashes --no-deps -r $here/requirements-build.txt
  pip install --no-cache-dir -q --require-hashes --no-deps --no-build-isolation -r $here/requirements-cpu.txt
  ;;
torch)
  if [ "$2" = cpu ]; then
    # What torch needs is among the libraries.
    pip install --no-cache-dir -q --no-deps $(/opt/venv/bin/python $here/pick_torch.py --cpu)
  else
    version=$(sed -n 's/^torch==//p' $here/constraints.txt)
    pip install --no-cache-dir -q "torch==$version+$2" --index-url "https://download.pytorch.org/whl/$2"
  fi
  ;;
cuadrilla)
  pip install --no-cache-dir -q --no-deps --no-build-isolation $here/cuadrilla
  pip check
  ;;
*)
  echo "error: no step $1" >&2
  exit 2
  ;;
esac
