#!/usr/bin/env python3
"""Measures Millpond and llama.cpp side by side, interleaved in one run, and prints rows for the ledger.

    bench/compare.py --model FILE.gguf --millpond target/release/millpond --llama DIR > rows.md

DIR holds llama-server and llama-bench. Leaving one of the two programs out measures the other alone. The rows
go to standard output, progress to standard error. What is measured and why: bench/README.md. This file starts
and stops what it measures; how a stream is timed is in streams.py, what the machine can do in machine.py.
"""

import argparse
import contextlib
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import machine
import streams
from streams import Ask, words

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
PREFILL_TOKENS = 512
PREFIX_TOKENS = 1024
SUFFIX_TOKENS = 32
NUM_PREFIX_FOLLOWERS = 4
# Requests of a measurement with few streams: enough for a percentile to mean something.
MIN_REQUESTS = 4


@dataclass(frozen=True)
class Server:
    """A program that serves completions on a port of this machine."""

    name: str
    command: tuple
    port: int

    @contextlib.contextmanager
    def running(self, logs):
        """Starts the server, waits until it is healthy, stops it at the end."""
        if self._is_healthy():
            sys.exit(f"something else already listens on port {self.port}")
        with open(logs / f"{self.name}.log", "w") as log:
            process = subprocess.Popen(self.command, stdout=log, stderr=log)
            try:
                self._wait_until_healthy(process)
                yield self
            finally:
                stop(process)

    def _wait_until_healthy(self, process):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if process.poll() is not None:
                sys.exit(f"{self.name} ended with {process.returncode}: {shlex.join(self.command)}")
            if self._is_healthy():
                return
            time.sleep(0.1)
        sys.exit(f"{self.name} is not healthy after two minutes")

    def _is_healthy(self):
        with contextlib.suppress(OSError):  # Refused, or HTTP that says "not yet".
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        return False


def stop(process):
    """Ends a server, by force if it takes too long: none may outlive the run."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# One round of one measurement: takes a server and the round's number, returns samples by key.


def measure_single_stream(server, number):
    """Prefill and decode of one stream: what llama-bench measures without HTTP."""
    prefill = streams.run(server.port, [Ask(words(f"prefill {number}", PREFILL_TOKENS), 1)], 1)[0]
    decode = streams.run(server.port, [Ask(words(f"decode {number}", 8), OUTPUT_TOKENS)], 1)[0]
    return {"prefill": [prefill.num_prompt / prefill.ttft], "decode": [decode.decode_rate]}


def measure_concurrent(server, number, num_streams):
    """`num_streams` at once, all prompts distinct."""
    num_requests = max(num_streams, MIN_REQUESTS)
    seeds = [f"streams {num_streams} round {number} request {index}" for index in range(num_requests)]
    asks = [Ask(words(seed, PROMPT_TOKENS), OUTPUT_TOKENS) for seed in seeds]
    timings = streams.run(server.port, asks, num_streams)
    span = max(t.arrivals[-1] for t in timings) - min(t.sent for t in timings)
    return {
        f"{num_streams} rate": [sum(t.num_output for t in timings) / span],
        f"{num_streams} ttft": [t.ttft for t in timings],
        f"{num_streams} itl": [gap for t in timings for gap in t.gaps],
        "prompt tokens": [t.num_prompt for t in timings],
    }


def measure_shared_prefix(server, number):
    """A prefix that is new in this round, then others behind the same prefix, one after the other."""
    prefix = words(f"prefix {number}", PREFIX_TOKENS)
    asks = [
        Ask(f"{prefix} {words(f'suffix {number} {index}', SUFFIX_TOKENS)}", 8)
        for index in range(1 + NUM_PREFIX_FOLLOWERS)
    ]
    first, *later = streams.run(server.port, asks, 1)
    return {
        "prefix cold": [first.ttft],
        "prefix warm": [t.ttft for t in later],
        "prefix cached": [t.num_cached for t in later],
    }


def measure_llama_bench(program, model, num_threads):
    """llama.cpp's own numbers, without a server."""
    sizes = ["-p", str(PREFILL_TOKENS), "-n", str(OUTPUT_TOKENS)]
    command = [program, "-m", model, "-t", str(num_threads), *sizes, "-r", "1", "-o", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    tests = json.loads(done.stdout)
    rate = {(test["n_prompt"], test["n_gen"]): test["avg_ts"] for test in tests}
    return {"bench prefill": [rate[PREFILL_TOKENS, 0]], "bench decode": [rate[0, OUTPUT_TOKENS]]}


def percentile(samples, share):
    """Linear interpolation between the two nearest samples."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * share
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def median_rate(samples):
    """Median and range over the rounds."""
    return f"{statistics.median(samples):.1f} ({min(samples):.1f}–{max(samples):.1f})"


def latency(samples):
    """p50 / p99 of all rounds' samples together, in milliseconds."""
    return f"{percentile(samples, 0.5) * 1e3:.1f} / {percentile(samples, 0.99) * 1e3:.1f}"


def table_rows(levels):
    """(label, key of the samples, how they become a cell) in the order of the table."""
    yield f"prefill of {PREFILL_TOKENS} tokens, tokens/s", "prefill", median_rate
    yield f"decode of {OUTPUT_TOKENS} tokens, tokens/s", "decode", median_rate
    yield f"llama-bench pp{PREFILL_TOKENS}, tokens/s", "bench prefill", median_rate
    yield f"llama-bench tg{OUTPUT_TOKENS}, tokens/s", "bench decode", median_rate
    for level in levels:
        streams_of = f"{level} stream{'s' if level > 1 else ''}"
        yield f"{streams_of}, output tokens/s", f"{level} rate", median_rate
        yield f"{streams_of}, TTFT p50 / p99, ms", f"{level} ttft", latency
        yield f"{streams_of}, ITL p50 / p99, ms", f"{level} itl", latency
    yield f"{PREFIX_TOKENS}-token prefix, first TTFT p50 / p99, ms", "prefix cold", latency
    yield f"{PREFIX_TOKENS}-token prefix, later TTFT p50 / p99, ms", "prefix warm", latency
    yield "cached tokens of the later ones", "prefix cached", lambda samples: f"{statistics.median(samples):.0f}"


def print_block(options, servers, samples, facts):
    """The ledger's rows of this run."""
    print(f"### {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {Path(options.model).name}\n")
    for name, value in facts.items():
        print(f"- {name}: {value}")
    print("\n| measure | " + " | ".join(server.name for server in servers) + " |")
    print("|---|" + "---|" * len(servers))
    for label, key, cell in table_rows(options.levels):
        cells = [cell(samples[server.name, key]) if samples[server.name, key] else "" for server in servers]
        if any(cells):
            print(f"| {label} | " + " | ".join(cells) + " |")
    print()


def facts_of(options, servers, samples):
    """What the numbers depend on: machine, ceiling, versions, commands."""
    prompt_tokens = {server.name: statistics.median(samples[server.name, "prompt tokens"]) for server in servers}
    facts = {
        "machine": machine.description(options.threads),
        "ceiling": f"{machine.read_bandwidth(options.threads) / 1e9:.1f} GB/s read by {options.threads} processes",
        "commit": machine.commit(Path(__file__).parent),
        "run": f"`{shlex.join([Path(sys.argv[0]).name, *displayed(sys.argv[1:])])}`",
        "prompts": ", ".join(f"{count:.0f} tokens as {name} counts" for name, count in prompt_tokens.items()),
    }
    for server in servers:
        facts[server.name] = f"`{shlex.join(displayed(server.command))}`"
    if options.llama:
        facts["llama.cpp version"] = llama_version(options.llama / "llama-server")
    return facts


def displayed(command):
    """A command without the folders of the machine it ran on."""
    return [Path(part).name if "/" in part else part for part in command]


def llama_version(program):
    """What the program says of itself."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return (done.stderr + done.stdout).strip().replace("\n", ", ")


def servers_of(options):
    """The servers to compare, Millpond first."""
    servers = []
    if options.millpond:
        flags = ["serve", "--model", options.model, "--host", "127.0.0.1", "--port", str(options.port)]
        flags += ["--threads", str(options.threads)]
        command = (str(options.millpond), *flags, *shlex.split(options.millpond_flags))
        servers.append(Server("Millpond", command, options.port))
    if options.llama:
        port, slots = options.port + 1, max(options.levels)
        flags = ["-m", options.model, "-t", str(options.threads), "--host", "127.0.0.1", "--port", str(port)]
        # A slot must hold the longest request; the context is shared out evenly.
        room = PREFIX_TOKENS + SUFFIX_TOKENS + OUTPUT_TOKENS + 128
        flags += ["-np", str(slots), "-c", str(slots * room)]
        command = (str(options.llama / "llama-server"), *flags, *shlex.split(options.llama_flags))
        servers.append(Server("llama.cpp", command, port))
    return servers


def measure(options, servers):
    """All rounds of all measurements; samples by (server's name, key)."""
    samples = defaultdict(list)
    measurements = [measure_single_stream, measure_shared_prefix]
    for level in options.levels:
        measurements.append(lambda server, number, level=level: measure_concurrent(server, number, level))

    def keep(name, found):
        for key, values in found.items():
            samples[name, key] += values

    for number in range(-1, options.rounds):  # Round −1 warms up and is not kept.
        # Who goes first changes from round to round, so that drift of the machine favours nobody.
        order = servers if number % 2 else servers[::-1]
        for run in measurements:
            for server in order:
                found = run(server, number)
                if number >= 0:
                    keep(server.name, found)
        if options.llama and number >= 0:
            found = measure_llama_bench(options.llama / "llama-bench", options.model, options.threads)
            keep("llama.cpp", found)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    return samples


def parsed_options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--millpond", type=Path, help="the millpond binary, built with --release")
    parser.add_argument("--millpond-flags", default="", help="more flags of `millpond serve`")
    parser.add_argument("--llama", type=Path, help="folder with llama-server and llama-bench")
    parser.add_argument("--llama-flags", default="", help="more flags of llama-server")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--levels", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--port", type=int, default=18080, help="the first of two ports")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for the servers' logs")
    return parser.parse_args()


def main():
    """Starts the servers, measures, prints."""
    options = parsed_options()
    # Being ended is an exit like any other: it must stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    servers = servers_of(options)
    if not servers:
        sys.exit("give --millpond, --llama or both")
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running(options.logs))
        samples = measure(options, servers)
    print_block(options, servers, samples, facts_of(options, servers, samples))


if __name__ == "__main__":
    main()
