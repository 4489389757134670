"""A streaming client of the OpenAI completions API that measures time and nothing else.

Arrival times are taken per socket read and all JSON is parsed after the last stream ended, so that the client
costs the measured server little on a machine that both share. Standard library only. Nothing here knows which
server it talks to.
"""

import http.client
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

# Each is one token in the usual vocabularies when a space precedes it.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name team "
    "minute idea body face level office door health person art war history party result change morning "
    "reason research girl moment air teacher force education foot boy age policy music market sense nation "
    "plan college interest death experience effect use class control field development role effort rate "
    "heart drug show leader light voice wife police mind price report decision son view relationship town "
    "road arm difference value building action season society tax position player record paper space ground"
).split()


class StreamError(Exception):
    """A server answered something else than the tokens that were asked for."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt and the exact number of tokens to generate."""

    prompt: str
    max_tokens: int

    def body(self):
        """The request body, greedy and without end of sequence so that every server does equal work."""
        return json.dumps(
            {
                "model": "default",
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


@dataclass(frozen=True)
class Timing:
    """What one stream did; seconds on one monotonic clock."""

    sent: float
    arrivals: tuple  # of chunks with text
    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def ttft(self):
        """Time to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self):
        """Inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]

    @property
    def decode_rate(self):
        """Tokens per second after the first."""
        return (self.num_output - 1) / (self.arrivals[-1] - self.arrivals[0])


def words(seed, count):
    """A prompt of `count` words that no other seed gives."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def run(port, asks, concurrency):
    """Sends `asks` over at most `concurrency` streams at once; timings in the order of `asks`."""
    threads = ThreadPoolExecutor(concurrency)
    try:
        raw = list(threads.map(lambda ask: _stream(port, ask), asks))
    finally:
        # Whoever interrupts the run stops the server next, which ends the streams: do not wait for them here.
        threads.shutdown(wait=False, cancel_futures=True)
    return [_timing(ask, *parts) for ask, parts in zip(asks, raw)]


def _stream(port, ask):
    """Sends one request; returns when it was sent and the reads of the answer as (time, bytes)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", ask.body(), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise StreamError(f"{response.status}: {response.read(500)}")
    reads = []
    while data := response.read1(1 << 16):
        reads.append((time.perf_counter(), data))
    connection.close()
    return sent, reads


def _timing(ask, sent, reads):
    arrivals, usage = [], {}
    for when, event in _events(reads):
        if "error" in event:
            raise StreamError(json.dumps(event)[:500])
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event.get("choices", [])):
            arrivals.append(when)
    if usage.get("completion_tokens") != ask.max_tokens or not arrivals:
        raise StreamError(f"asked for {ask.max_tokens} tokens, got usage {usage} and {len(arrivals)} chunks")
    details = usage.get("prompt_tokens_details") or {}
    num_cached = details.get("cached_tokens") or 0
    return Timing(sent, tuple(arrivals), usage["prompt_tokens"], num_cached, ask.max_tokens)


def _events(reads):
    """The server-sent events, each with the time at which its last byte arrived; an event is one line."""
    rest = b""
    for when, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield when, json.loads(payload)
