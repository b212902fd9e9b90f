"""The unchanged `openai` package against the router's HTTP port.

Runs under the system's Python, which has gRPC, and starts itself again under the environment that has the
package (./dev test makes it). Without that environment the test is skipped.
"""
import os
import subprocess
import sys

SKIPPED = 77
sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")

if len(sys.argv) < 2:
    python = os.environ["DELTAMESH_OPENAI_PYTHON"]
    if not os.path.exists(python):
        print(f"skipped: {python} is not there; ./dev test makes it")
        sys.exit(SKIPPED)
    from processes import GOLDEN, Mesh
    mesh = Mesh(os.path.join(GOLDEN, "kimi_k3_tiny"), worker_flags=["--context-tokens=1024"])
    try:
        code = subprocess.run([python, __file__, mesh.http()], timeout=100).returncode
    finally:
        mesh.close()
    sys.exit(code)

import openai  # noqa: E402

client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=30)
model = client.models.list().data[0].id
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a mesh?"}]

whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0,
                                       logprobs=True, top_logprobs=2)
choice = whole.choices[0]
assert choice.finish_reason == "length", choice
assert choice.message.role == "assistant"
assert whole.usage.completion_tokens == 12
assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
assert len(choice.logprobs.content) == 12 and len(choice.logprobs.content[0].top_logprobs) == 2

# The stream is the same answer in pieces.
text, reasoning, usage, finish = "", "", None, None
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0,
                                            stream=True, stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    for piece in chunk.choices:
        text += piece.delta.content or ""
        reasoning += getattr(piece.delta, "reasoning_content", None) or ""
        finish = piece.finish_reason or finish
assert text == (choice.message.content or "")
assert reasoning == (getattr(choice.message, "reasoning_content", None) or "")
assert finish == "length" and usage.completion_tokens == 12

# A seed repeats itself; another one does not.
def sampled(seed):
    return client.completions.create(model=model, prompt="Once", max_tokens=16, temperature=1.5,
                                     seed=seed).choices[0].text
assert sampled(7) == sampled(7) != sampled(8)

# A stop string ends the text before it.
base = client.completions.create(model=model, prompt="Once", max_tokens=16, temperature=0).choices[0].text
stop = next(base[i] for i in range(2, len(base)) if base[i] not in base[:i])
stopped = client.completions.create(model=model, prompt="Once", max_tokens=16, temperature=0, stop=[stop])
assert stopped.choices[0].text == base.split(stop)[0], (base, stop, stopped)
assert stopped.choices[0].finish_reason == "stop"

# Errors are the package's own kinds and name the field.
def refused(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")
refused(openai.BadRequestError, "temperature",
        lambda: client.chat.completions.create(model=model, messages=messages, temperature=9))
refused(openai.BadRequestError, "messages",
        lambda: client.chat.completions.create(model=model, messages=[]))
refused(openai.NotFoundError, "nothing",
        lambda: client.chat.completions.create(model="nothing", messages=messages))

# A stream that is left frees the connection; the next request works.
stream = client.chat.completions.create(model=model, messages=messages, max_tokens=500, stream=True)
next(iter(stream))
stream.close()
assert client.completions.create(model=model, prompt="x", max_tokens=1).usage.completion_tokens == 1
print("ok")
