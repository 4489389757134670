"""What a measurement depends on besides the programs: processor, memory bandwidth, commit.

Reads facts and measures the ceiling; starts no server. Standard library only.
"""

import os
import platform
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Far larger than any cache that the scan could stay in.
SCAN_BYTES = 1 << 29


def description(num_threads):
    """One line: processor, cores, memory, system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} logical cores ({num_threads} threads used), {memory:.0f} GiB, "
        f"{platform.system()}, load {os.getloadavg()[0]:.1f} at the start"
    )


def _processor():
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    levels = [flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8") if flag in fields.get("flags", "").split()]
    identity = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{name} ({identity}; {' '.join(levels) or 'baseline'})"


def read_bandwidth(num_threads):
    """Bytes per second that `num_threads` processes read from memory together, best of three scans.

    The scan is the C library's search for a byte that does not occur: vector loads and nothing else.
    """
    with ProcessPoolExecutor(num_threads) as processes:
        spans = list(processes.map(_scan, range(num_threads)))
    # The processes start together up to their set-up; each rate is taken over its own scans.
    return sum(SCAN_BYTES / span for span in spans)


def _scan(_index):
    data = b"\1" * SCAN_BYTES
    spans = []
    for _ in range(3):
        start = time.perf_counter()
        data.find(b"\0")
        spans.append(time.perf_counter() - start)
    return min(spans)


def commit(folder):
    """Short hash of the checked-out commit, marked when the tree differs from it."""
    def git(*arguments):
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain") else "")
