"""Runs the official OpenAI client against a Millpond server, streaming and not, without a workaround.

usage: openai_client.py http://127.0.0.1:PORT/v1
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
QUESTION = [{"role": "user", "content": "Name three rivers."}]
passed = failed = 0


def check(name):
    def run(test):
        global passed, failed
        try:
            test()
            passed += 1
        except Exception as error:  # every check runs; the exit code tells
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")

    return run


def chat(**options):
    options = {"model": MODEL, "messages": QUESTION, "seed": 7, "max_tokens": 24} | options
    return client.chat.completions.create(**options)


@check("a chat answers and counts its tokens")
def _():
    answer = chat()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert answer.system_fingerprint


@check("a streamed chat gives the same text")
def _():
    whole = chat().choices[0].message.content
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole, (text, whole)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(reasons) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


@check("n choices, the first equal to a single answer")
def _():
    one, three = chat(temperature=0.9), chat(temperature=0.9, n=3)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert three.choices[0].message.content == one.choices[0].message.content


@check("log-probabilities of a chat")
def _():
    answer = chat(logprobs=True, top_logprobs=2, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.logprob <= 0
    assert bytes(b for e in content for b in e.bytes).decode().startswith(answer.choices[0].message.content)


@check("a stop string ends the answer")
def _():
    answer = chat(stop=["\n"], max_tokens=64)
    assert "\n" not in answer.choices[0].message.content


@check("a completion, whole and streamed")
def _():
    ask = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**ask)
    streamed = client.completions.create(stream=True, **ask)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert "Paris" in whole.choices[0].text, whole.choices[0].text


@check("a list of prompts, echo and legacy log-probabilities")
def _():
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=4, echo=True, logprobs=2, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One, two,")
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.token_logprobs[0] is None


@check("errors have the client's types and name the field")
def _():
    for expected, options in [
        (openai.BadRequestError, {"temperature": 3}),
        (openai.BadRequestError, {"max_tokens": 10**9}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ]:
        try:
            chat(**options)
        except expected as error:
            assert error.param == next(iter(options)), error.body
        else:
            raise AssertionError(f"{options} was accepted")


@check("models are listed and retrieved")
def _():
    assert client.models.retrieve(MODEL).id == MODEL


print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
