#!/usr/bin/env bash
# Builds Horovod's last release for the Python and the torch of a virtual environment, and installs it there.
#
# That release predates a torch that needs C++17, and asks its compiler for C++14; so the compiler is called through a
# wrapper that puts the standard right. The source comes from the package registry and is pinned by its hash; the wheel
# is kept, because it takes minutes. A wheel fits one Python, one torch, and MPI or not, so those are its folder's name.
set -euo pipefail

VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
EXIT_TOOL_MISSING=3

usage() {
    cat <<END
usage: ${0##*/} [--python PATH] [--mpi auto|0|1]

Builds Horovod $VERSION once, keeps the wheel, and installs it into the environment of a Python that has torch.

  --python PATH   that Python (.venv/bin/python)
  --mpi WHICH     1 builds with MPI, which Adasum and communication_backend="mpi" need; 0 with gloo alone;
                  auto (the default) with MPI where mpicxx and its headers are installed

Wheels are kept in \${XDG_CACHE_HOME:-~/.cache}/distributed-training/wheels. A first build takes 3 to 10 minutes.
Ends with $EXIT_TOOL_MISSING when a tool is missing (a compiler, MPI), with 1 when the build failed.
END
}

say() { echo "horovod: $*"; }
fail() {
    echo "horovod: $1" >&2
    exit "${2:-1}"
}

python=.venv/bin/python mpi=auto
while [[ $# -gt 0 ]]; do
    case $1 in
        --python) python=${2:?--python needs a path} && shift 2 ;;
        --mpi) mpi=${2:?--mpi needs auto, 0 or 1} && shift 2 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done
[[ $mpi =~ ^(auto|0|1)$ ]] || fail "--mpi takes auto, 0 or 1, not '$mpi'" 2
[[ -x $python ]] || fail "there is no Python at $python; name one that has torch: --python PATH"
tag=$("$python" -c 'import platform, sys; from importlib.metadata import version
print(sys.implementation.cache_tag, platform.machine(), "torch" + version("torch"), sep="-")' 2>/dev/null) ||
    fail "$python has no torch, which Horovod is built against: pip install torch, or name another with --python"

if [[ $mpi != 0 ]]; then
    if echo '#include <mpi.h>' | mpicxx -x c++ -fsyntax-only - 2>/dev/null; then  # mpicxx may be there without headers
        mpi=1
    elif [[ $mpi == 1 ]]; then
        fail "built with MPI it needs mpicxx and mpi.h: apt-get install libopenmpi-dev openmpi-bin
         (without MPI: make horovod MPI=0)" $EXIT_TOOL_MISSING
    else
        mpi=0
    fi
fi
# A libhorovod linked with MPI does not load where libmpi is missing, so that is another wheel.
[[ $mpi == 1 ]] && kind=mpi || kind=gloo
key=horovod-$VERSION-$tag-$kind
cache=${XDG_CACHE_HOME:-$HOME/.cache}/distributed-training/wheels
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
stamp=$site/horovod-$VERSION.dist-info/built-for

if [[ -f $stamp && -f ${stamp%/*}/METADATA && $(<"$stamp") == "$key" ]]; then
    say "$key is installed"
    exit 0
fi

mkdir -p "$cache"
exec 9>"$cache/$key.lock"
if ! flock --nonblock 9; then
    say "another build of $key is running; waiting for it"
    flock 9
fi

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# Everything half-made lives in a folder beside the cache, and a wheel gets its place by one rename.
build() {
    local work=$1 log=$2 compiler cmake
    compiler=$(command -v "${CXX:-g++}") ||
        fail "a C++17 compiler is needed and ${CXX:-g++} is not on the PATH: apt-get install g++ make" $EXIT_TOOL_MISSING
    command -v make >/dev/null || fail "make is needed: apt-get install make" $EXIT_TOOL_MISSING
    printf '%s\n' '#!/usr/bin/env bash' "exec $(printf %q "$compiler") \"\${@/#-std=c++14/-std=c++17}\" -g0" >"$work/c++"
    chmod +x "$work/c++"
    printf 'horovod==%s --hash=sha256:%s\n' "$VERSION" "$SHA256" >"$work/requirements.txt"

    # What builds it goes into a folder of its own, as far as the environment does not have it.
    local tools
    mapfile -t tools < <("$python" -c '
from importlib.util import find_spec
def has(name):
    try: return find_spec(name) is not None
    except ModuleNotFoundError: return False
needs = {"setuptools": "setuptools.command.bdist_wheel", "pyyaml": "yaml"}
for name in ("setuptools", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml"):
    if not has(needs.get(name, name)): print(name)')
    cmake=$(command -v cmake) || { tools+=(cmake) && cmake=$work/tools/bin/cmake; }
    if [[ ${#tools[@]} -gt 0 ]]; then
        pip install --quiet --target "$work/tools" "${tools[@]}" >>"$log" 2>&1 || return 1
    fi
    env PYTHONPATH="$work/tools" CXX="$work/c++" LDFLAGS=-Wl,-s MAKEFLAGS="-j$(nproc)" TMPDIR="$work" \
        HOROVOD_CMAKE="$cmake" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
        "$([[ $mpi == 1 ]] && echo HOROVOD_WITH_MPI=1 || echo HOROVOD_WITHOUT_MPI=1)" \
        "$python" -m pip --disable-pip-version-check wheel --no-cache-dir --no-build-isolation --no-deps \
        --no-binary horovod --require-hashes --requirement "$work/requirements.txt" --wheel-dir "$work/wheel" \
        --verbose >>"$log" 2>&1 9>&-
}

if [[ ! -d $cache/$key ]]; then
    safe=building-${key//[^A-Za-z0-9.-]/-}  # Horovod's CMake files take the path for a regular expression: no "+" in it
    rm -rf "$cache/$safe".*  # of a build that was killed: the lock is ours
    work=$(mktemp -d "$cache/$safe.XXXXXXXX")
    trap 'rm -rf "$work"' EXIT
    log=$cache/$key.log
    : >"$log"
    say "building $key, once, on $(nproc) cores: 3 to 10 minutes; log: $log"
    SECONDS=0
    if ! build "$work" "$log"; then
        tail -n 30 "$log" >&2
        fail "the build failed after $SECONDS s; the whole log: $log"
    fi
    mv -T "$work/wheel" "$cache/$key"
    say "built in $SECONDS s: $(ls "$cache/$key")"
fi

# What it needs at run time by name, since its own list would pull nothing else that is used here.
needs=(cloudpickle psutil pyyaml packaging cffi setuptools)
pins=$(dirname "$0")/../constraints.txt constraint=()
[[ ! -f $pins ]] || constraint=(--constraint "$pins")
pip install --quiet "${constraint[@]}" "${needs[@]}"
pip install --quiet --no-deps --force-reinstall "$cache/$key"/horovod-*.whl
# A package without its library is imported with a warning, and has nothing in it.
if ! "$python" -c 'import horovod.torch as hvd; hvd.is_initialized()' 2>>"$cache/$key.log"; then
    rm -rf "${cache:?}/$key"
    fail "the wheel does not load, and was removed; see $cache/$key.log"
fi
echo "$key" >"$stamp"
say "installed $key"
