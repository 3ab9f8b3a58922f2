"""Profiles of clouds as data: which link a kind of machine has, and the variables that its ranks want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Link = Literal["TCP", "EFA", "InfiniBand"]


@dataclass(frozen=True)
class ProfileVariable:
    """A variable of NCCL, or of the library under it; those that name the interface are the same in all profiles."""

    name: str
    value: str
    reason: str
    file: str = ""  # a pattern, whose first file is the value: there must be one


@dataclass(frozen=True)
class CloudProfile:
    """What a kind of machine has, and what its ranks want."""

    machines: str
    link: Link
    variables: tuple[ProfileVariable, ...]
    mtu: int = 0  # that its network can have: a smaller one is said
    plugins: tuple[str, ...] = ()  # patterns of the library that NCCL needs for this link: none of them is said


CLOUDS: dict[str, CloudProfile] = {
    "gcp": CloudProfile(
        "Google Cloud: gVNIC, without InfiniBand",
        "TCP",
        (
            ProfileVariable("NCCL_IB_DISABLE", "1", "there is no InfiniBand to look for"),
            ProfileVariable("NCCL_SOCKET_NTHREADS", "4", "one connection does not fill a gVNIC; NCCL has 1 by default"),
            ProfileVariable("NCCL_NSOCKS_PERTHREAD", "4", "4 connections for each of 4 threads; NCCL allows 64"),
            ProfileVariable(
                "NCCL_BUFFSIZE", str(8 * 2**20), "16 connections share what is sent at once; NCCL has 4 MiB by default"
            ),
        ),
        mtu=8896,
    ),
    "aws-efa": CloudProfile(
        "AWS p4d and p5: EFA through aws-ofi-nccl",
        "EFA",
        (
            ProfileVariable("FI_PROVIDER", "efa", "libfabric is to take EFA, and never TCP in its place"),
            ProfileVariable("FI_EFA_USE_DEVICE_RDMA", "1", "cards read GPU memory; older libfabrics need to be told"),
            ProfileVariable("FI_EFA_USE_HUGE_PAGE", "0", "processes that read data are forked, which huge pages break"),
            ProfileVariable("NCCL_BUFFSIZE", str(8 * 2**20), "EFA's round trip is long; NCCL has 4 MiB by default"),
            ProfileVariable("NCCL_P2P_NET_CHUNKSIZE", str(512 * 2**10), "for the same reason: 128 KiB by default"),
        ),
        plugins=(
            "/opt/amazon/ofi-nccl/lib*/libnccl-net*.so",
            "/opt/amazon/ofi-nccl/lib*/*/libnccl-net*.so",
            "/opt/aws-ofi-nccl/lib*/libnccl-net*.so",
        ),
    ),
    "azure-ib": CloudProfile(
        "Azure ND A100 v4 and H100 v5: InfiniBand",
        "InfiniBand",
        (
            ProfileVariable(
                "NCCL_TOPO_FILE",
                "{file}",
                "the virtual machine hides which card is next to which GPU, and this file says it",
                file="/opt/microsoft/nd*-topo.xml",
            ),
            ProfileVariable(
                "NCCL_IB_PCI_RELAXED_ORDERING", "1", "through a hypervisor, strictly ordered writes are slow"
            ),
        ),
    ),
}

PATTERNS = tuple(
    pattern
    for cloud in CLOUDS.values()
    for pattern in (*cloud.plugins, *(variable.file for variable in cloud.variables if variable.file))
)
