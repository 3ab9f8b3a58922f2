#!/usr/bin/env bash
# Every way to start the same training script; the way is the first argument.
#
#   ./launch_ddp.sh laptop [processes]               the script starts CPU processes itself
#   ./launch_ddp.sh gpus [number]                    the GPUs of this machine; all of them by default
#   ./launch_ddp.sh nodes <nodes> <gpus a node> <host of one node>     run it on every node
#   ./launch_ddp.sh torchrun [processes]             by PyTorch's own launcher
#   ./launch_ddp.sh srun <nodes> <ranks a node>      by Slurm; inside an allocation, or it asks for one
#
# What follows -- goes to the script:  ./launch_ddp.sh laptop 2 -- --epochs 3
# Variables: SCRIPT (ddp_mnist.py here), PYTHON (python3), MASTER_PORT (nodes: 29400),
#            SRUN_OPTIONS (srun: words to add, such as --gpus-per-node=4 --time=01:00:00).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${SCRIPT:-$here/ddp_mnist.py}
python=${PYTHON:-python3}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

way=()
while [[ $# -gt 0 && $1 != -- ]]; do
    way+=("$1")
    shift
done
[[ ${1:-} != -- ]] || shift
arguments=("$@")

# Exactly $1 words beside the way itself, or up to $2.
takes() {
    local given=$((${#way[@]} - 1))
    [[ $given -ge $1 && $given -le $2 ]] || usage
}

case "${way[0]:-}" in
laptop)
    takes 0 1
    exec "$python" "$script" --num-gpus "${way[1]:-2}" ${arguments[@]+"${arguments[@]}"}
    ;;
gpus)
    takes 0 1
    number=()
    [[ ${#way[@]} -lt 2 ]] || number=(--num-gpus "${way[1]}")
    exec "$python" -m distributed train --script "$script" --device cuda ${number[@]+"${number[@]}"} \
        -- ${arguments[@]+"${arguments[@]}"}
    ;;
nodes)
    takes 3 3
    exec "$python" -m distributed train --script "$script" --num-nodes "${way[1]}" --gpus-per-node "${way[2]}" \
        --master-addr "${way[3]}" --master-port "${MASTER_PORT:-29400}" -- ${arguments[@]+"${arguments[@]}"}
    ;;
torchrun)
    takes 0 1
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${way[1]:-2}" "$script" \
        ${arguments[@]+"${arguments[@]}"}
    ;;
srun)
    takes 2 2
    options=()
    [[ -z ${SRUN_OPTIONS:-} ]] || read -ra options <<<"$SRUN_OPTIONS"
    exec srun --nodes "${way[1]}" --ntasks-per-node "${way[2]}" ${options[@]+"${options[@]}"} \
        "$python" "$script" ${arguments[@]+"${arguments[@]}"}
    ;;
*)
    usage
    ;;
esac
