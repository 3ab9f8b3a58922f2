#!/usr/bin/env bash
# The system's tools that some tests start for real: MPI, a Slurm cluster, a terminal, hosts on a network of their own,
# Azure's storage;
# and those that Horovod and DeepSpeed's operators are built with.
# Installs what is missing where that is possible without asking anybody; else says what is missing, in one line.
set -euo pipefail

declare -A package_of=(
    [mpirun]=openmpi-bin
    [g++]=g++
    [cmake]=cmake
    [slurmctld]=slurmctld
    [slurmd]=slurmd
    [srun]=slurm-client
    [munged]=munge
    [tmux]=tmux
    [ip]=iproute2
    [iperf3]=iperf3
)

# Azure's blob storage, for object stores at abfs://: a package of npm's, in this user's cache.
azurite=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/distributed-training/azurite
if ! command -v azurite-blob >/dev/null && [[ ! -x $azurite/node_modules/.bin/azurite-blob ]] && command -v npm >/dev/null; then
    echo "system tools: installing azurite"
    npm install --silent --no-audit --no-fund --prefix "$azurite" azurite@3 >/dev/null 2>&1 ||
        echo "system tools: without azurite (npm could not install it); the tests that need it say so and are skipped"
fi

PATH=$PATH:/usr/sbin:/sbin
missing=() packages=()
for tool in "${!package_of[@]}"; do
    if ! command -v "$tool" >/dev/null; then
        missing+=("$tool")
        packages+=("${package_of[$tool]}")
    fi
done
if ! echo '#include <mpi.h>' | mpicxx -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=(mpi.h)
    packages+=(libopenmpi-dev)
fi
if ! echo '#include <libaio.h>' | g++ -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=(libaio.h)
    packages+=(libaio-dev)
fi
[[ ${#missing[@]} -gt 0 ]] || exit 0
[[ " ${missing[*]} " != *" slurm"* ]] || packages+=(slurm-wlm-basic-plugins)

skip() {
    echo "system tools: without ${missing[*]} ($1); the tests that need them say so and are skipped"
    exit 0
}

as_root=(env DEBIAN_FRONTEND=noninteractive)
command -v apt-get >/dev/null || skip "no apt-get here"
if [[ $(id -u) -ne 0 ]]; then
    sudo -n true 2>/dev/null || skip "not root, and sudo asks for a password"
    as_root=(sudo -n "${as_root[@]}")
fi

echo "system tools: installing ${packages[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" apt-get install -qq -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    skip "apt-get could not install them"
fi
