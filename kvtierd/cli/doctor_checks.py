"""Checks of the machine: kernel, limits, memory, permissions, clock, placement, GPU, and the daemon if it runs."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

from kvtierd import __version__
from kvtierd.cli.finding import Check, Finding, Verdict
from kvtierd.config.fields import split_folders
from kvtierd.config.schema import Settings
from kvtierd.core.errors import KvtierdError
from kvtierd.core.units import GIB, format_bytes
from kvtierd.daemon.directories import Places
from kvtierd.daemon.file_limit import descriptors_wanted
from kvtierd.protocol.client import Client
from kvtierd.protocol.connection import Unavailable
from kvtierd.protocol.endpoint import SOCKET_NAME
from kvtierd.protocol.mapping import HUGE_PAGE_BYTES, SharedMapping

KERNEL_WANTED = (5, 10)
"""Sealed memfds that only we may write (5.1), pidfd (5.3), and what Debian 11 has."""
OVERHEAD_BYTES = GIB
"""What the daemon takes besides its tiers, generously."""
_PROC = Path("/proc")
_SYS = Path("/sys")


def daemon(settings: Settings) -> Iterator[Finding]:
    """Whether one runs and answers."""
    # Where clients look, if somebody said so; else where this configuration has the daemon listen.
    endpoint = os.environ.get("KVTIERD_ENDPOINT") or f"ipc://{Places.of(settings).tenant / SOCKET_NAME}"
    try:
        with Client(endpoint, timeout_s=2.0, arena=False, name="kvtierctl doctor") as client:
            stats = client.stats()
    except (Unavailable, ValueError) as error:
        yield Finding("daemon", Verdict.NOTE, f"none answers: {error}")
        return
    except KvtierdError as error:
        advice = "restart whichever of daemon and command is older" if "version" in str(error) else ""
        yield Finding("daemon", Verdict.WARN, f"one answers on {endpoint}, and refuses: {error}", advice)
        return
    version = stats.get("daemon_version", "")
    if version == __version__:
        yield Finding("daemon", Verdict.OK, f"version {version} answers on {endpoint}, pid {stats['daemon_pid']}")
    else:
        text = f"version {version} runs and {__version__} is installed"
        yield Finding("daemon", Verdict.WARN, text, "systemctl restart kvtierd")
    if reason := stats.get("memory_error"):
        yield Finding("daemon memory", Verdict.FAIL, f"the host tier has not got its memory: {reason}")


def kernel(_settings: Settings) -> Iterator[Finding]:
    """What the kernel can do."""
    release = platform.release()
    found = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if found < KERNEL_WANTED:
        wanted = ".".join(map(str, KERNEL_WANTED))
        yield Finding("kernel", Verdict.FAIL, f"{release} is too old", f"Linux {wanted} or later is needed")
    else:
        yield Finding("kernel", Verdict.OK, release)


def permissions(settings: Settings) -> Iterator[Finding]:
    """The folders of the daemon, for whoever runs this."""
    places = Places.of(settings)
    tenants = ((f"folder of {tenant.name}", tenant.path) for tenant in places.tenants)
    sockets = (("runtime folder", places.runtime), *tenants)
    for name, folder in (*sockets, *(("data", folder) for folder in places.data)):
        try:
            mode = folder.stat()
        except FileNotFoundError:
            parent = next(path for path in folder.parents if path.exists())
            can = os.access(parent, os.W_OK | os.X_OK)
            text = f"{folder} is not there" + (
                "; the daemon will make it" if can else f", and {parent} is not writable"
            )
            yield Finding(name, Verdict.NOTE if can else Verdict.FAIL, text, "" if can else f"mkdir {folder}, chown it")
            continue
        text = f"{folder} has mode {stat.S_IMODE(mode.st_mode):04o}, owner {mode.st_uid}:{mode.st_gid}"
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(name, Verdict.FAIL, f"{text}: not writable by user {os.geteuid()}", "change its owner")
        elif mode.st_mode & stat.S_IWOTH and not mode.st_mode & stat.S_ISVTX:
            yield Finding(name, Verdict.FAIL, f"{text}: writable by everybody", f"chmod o-w {folder}")
        else:
            yield Finding(name, Verdict.OK, text)


def limits(settings: Settings) -> Iterator[Finding]:
    """Locked memory and descriptors: those of the daemon if it runs, for a shell's own are often lower."""
    pid = _daemon_pid(settings)
    _soft, locked = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < settings.host.capacity:
        verdict = Verdict.WARN if _gpus() else Verdict.NOTE
        text = f"{format_bytes(locked)} may be locked, and the host tier is {format_bytes(settings.host.capacity)}"
        yield Finding("memlock", verdict, text, "pinning for a GPU needs LimitMEMLOCK=infinity, as the unit has it")
    else:
        yield Finding("memlock", Verdict.OK, "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked))
    wanted = descriptors_wanted(settings)
    _soft, files = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted:
        yield Finding("descriptors", Verdict.WARN, f"{files} allowed, {wanted} may be needed", "raise LimitNOFILE")
    else:
        yield Finding("descriptors", Verdict.OK, f"{wanted} may be needed, {files} allowed")


def memory(settings: Settings) -> Iterator[Finding]:
    """Room for the tiers, shared memory and huge pages."""
    info = {name: int(value.split()[0]) for name, value in _pairs(_PROC / "meminfo")}
    available = info["MemAvailable"] * 1024
    # The gpu tier is ordinary memory in this version, whatever is in the machine.
    wanted = settings.host.capacity + settings.gpu.capacity + OVERHEAD_BYTES
    text = f"{format_bytes(available)} available, about {format_bytes(wanted)} wanted"
    if wanted > available:
        yield Finding(
            "memory", Verdict.WARN, text, "lower host.capacity; a daemon that runs already is in the first figure"
        )
    else:
        yield Finding("memory", Verdict.OK, text)
    if (limit := _cgroup_limit()) and limit < wanted:
        yield Finding(
            "memory limit", Verdict.FAIL, f"this control group allows {format_bytes(limit)}", "raise MemoryMax="
        )
    yield Finding("shared memory", Verdict.OK, "the arena is made of memfds: /dev/shm and its size do not matter")
    yield from _huge_pages()


def clock(_settings: Settings) -> Iterator[Finding]:
    """Deadlines and leases are told by CLOCK_MONOTONIC: reading it must be cheap."""
    source = _text(_SYS / "devices/system/clocksource/clocksource0/current_clocksource")
    if source in {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}:
        yield Finding("clock", Verdict.OK, f"clock source {source}, read without a system call")
    else:
        text = f"clock source {source or 'unknown'}: each reading is a system call"
        yield Finding("clock", Verdict.WARN, text, "see the kernel's log for why tsc is not used")


def placement(settings: Settings) -> Iterator[Finding]:
    """NUMA nodes, and where GPU and disk are attached."""
    nodes = sorted((_SYS / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        yield Finding("numa", Verdict.OK, "one node: everything is near everything")
        return
    folders = split_folders(settings.nvme.directory)
    disk = _disk_node(Path(folders[0])) if folders else -1
    gpus = {name: _number(path / "numa_node") for name, path in _gpus().items()}
    text = f"{len(nodes)} nodes; disk on {disk}; " + (
        ", ".join(f"GPU {n} on {at}" for n, at in gpus.items()) or "no GPU"
    )
    apart = disk >= 0 and any(node >= 0 and node != disk for node in gpus.values())
    advice = "bytes between disk and GPU cross the sockets' link: put them on one node, or start with NUMAPolicy=bind"
    yield Finding("numa", Verdict.WARN if apart else Verdict.OK, text, advice if apart else "")


def gpu(settings: Settings) -> Iterator[Finding]:
    """What the gpu tier needs."""
    if not settings.gpu.capacity:
        yield Finding("gpu", Verdict.NOTE, "gpu.capacity is 0: there is no gpu tier")
        return
    found, wanted = _gpus(), settings.gpu.device
    if wanted.startswith("cuda") and not found:
        text = f"gpu.device is {wanted} and there is no NVIDIA device (exit code 69)"
        yield Finding("gpu", Verdict.FAIL, text, "set it to auto or host")
        return
    if not found:
        yield Finding("gpu", Verdict.NOTE, "no NVIDIA device: the gpu tier is ordinary memory")
        return
    if not (_PROC / "driver/nvidia/version").exists():
        yield Finding(
            "gpu", Verdict.FAIL, f"{len(found)} NVIDIA devices, but the driver is not loaded", "modprobe nvidia"
        )
    elif not Path("/dev/nvidia-uvm").exists():
        advice = "write nvidia-uvm into a file of /etc/modules-load.d: the service may not load it"
        yield Finding("gpu", Verdict.WARN, "the module nvidia-uvm is not loaded", advice)
    else:
        version = _text(_PROC / "driver/nvidia/version").splitlines()[0]
        yield Finding("gpu", Verdict.OK, f"{len(found)} NVIDIA devices; {version}")


CHECKS: tuple[Check, ...] = (
    ("daemon", daemon),
    ("kernel", kernel),
    ("permissions", permissions),
    ("limits", limits),
    ("memory", memory),
    ("clock", clock),
    ("numa", placement),
    ("gpu", gpu),
)


def _daemon_pid(settings: Settings) -> int:
    """The daemon that holds the runtime folder's lock, or 0, which stands for this process."""
    text = _text(Places.of(settings).lock)
    return int(text) if text.isdigit() and (_PROC / text).exists() else 0


def _huge_pages() -> Iterator[Finding]:
    """Tried for real: what the settings say does not decide it (kvtierd.tiers.arena)."""
    refused = _collapse_probe()
    if not refused:
        yield Finding("huge pages", Verdict.OK, "the host tier's memory lies in them")
        return
    shown = re.search(r"\[(\w+)\]", _text(_SYS / "kernel/mm/transparent_hugepage/shmem_enabled"))
    why = "shmem_enabled is deny" if shown and shown[1] == "deny" else os.strerror(refused)
    advice = "copies take about a quarter longer; Linux gives them from 6.1 on, unless shmem_enabled is deny"
    yield Finding("huge pages", Verdict.NOTE, f"shared memory gets none: {why}", advice)


def _collapse_probe() -> int:
    """Have one huge page of shared memory made; 0, or the errno of the refusal."""
    descriptor = os.memfd_create("kvtierd-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, HUGE_PAGE_BYTES)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        return SharedMapping(descriptor, HUGE_PAGE_BYTES, writable=True).collapse()
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        os.close(descriptor)


def _gpus() -> dict[str, Path]:
    """PCI devices of NVIDIA that are display or 3D controllers, by address."""
    found = {}
    for device in sorted((_SYS / "bus/pci/devices").glob("*")):
        if _text(device / "vendor") == "0x10de" and _text(device / "class")[:4] == "0x03":
            found[device.name] = device
    return found


def _disk_node(folder: Path) -> int:
    """NUMA node of the disk under a folder; -1 where nobody says."""
    where = next(path for path in (folder, *folder.parents) if path.exists())
    device = where.stat().st_dev
    path = (_SYS / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for parent in (path, *path.parents):
        if (node := parent / "numa_node").exists():
            return _number(node)
        if (node := parent / "device/numa_node").exists():
            return _number(node)
    return -1


def _cgroup_limit() -> int:
    """Most memory that this control group may have; 0 for no limit that can be seen."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        if line.startswith("0::"):
            limit = _text(_SYS / "fs/cgroup" / line[3:].lstrip("/") / "memory.max")
            return int(limit) if limit.isdigit() else 0
    return 0


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _text(path: Path) -> str:
    """What a file of /proc or /sys says; "" where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1
