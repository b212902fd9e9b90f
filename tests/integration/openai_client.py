"""The real `openai` package against a running mesh. Run by openai_test.py in an environment that has it.

Arguments come from the environment: DELTAMESH_BASE_URL, and DELTAMESH_EXPECTED, the greedy answer to
MESSAGES as gRPC gives it.
"""
import asyncio
import json
import os
import unittest

import openai

BASE_URL = os.environ["DELTAMESH_BASE_URL"]
EXPECTED = json.loads(os.environ["DELTAMESH_EXPECTED"])
MESSAGES = json.loads(os.environ["DELTAMESH_MESSAGES"])
TOKENS = 24
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def chat(client, **more):
    options = dict(model=EXPECTED["model"], messages=MESSAGES, max_tokens=TOKENS, temperature=0)
    return client.chat.completions.create(**{**options, **more})


def said(message):
    return (message.content or "", getattr(message, "reasoning_content", None) or "")


def joined(chunks):
    text, reasoning, finish, usage = "", "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    return text, reasoning, finish, usage


class OpenAiClient(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=30)
        self.addCleanup(self.client.close)

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([m.id for m in models], [EXPECTED["model"]])
        self.assertEqual(self.client.models.retrieve(EXPECTED["model"]).id, EXPECTED["model"])

    def test_chat_equals_grpc_streamed_and_not(self):
        whole = chat(self.client)
        self.assertEqual(said(whole.choices[0].message), (EXPECTED["text"], EXPECTED["reasoning"]))
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, TOKENS)
        self.assertEqual(whole.usage.total_tokens, whole.usage.prompt_tokens + TOKENS)
        # gRPC asked the same before: all but the last block may have been restored.
        again = chat(self.client)
        self.assertEqual(said(again.choices[0].message), said(whole.choices[0].message))
        self.assertLess(again.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens)
        self.assertEqual(again.usage.prompt_tokens_details.cached_tokens % 64, 0)
        text, reasoning, finish, usage = joined(
            chat(self.client, stream=True, stream_options={"include_usage": True}))
        self.assertEqual((text, reasoning), (EXPECTED["text"], EXPECTED["reasoning"]))
        self.assertEqual(finish, "length")
        self.assertEqual(usage.prompt_tokens, whole.usage.prompt_tokens)

    def test_seed_decides(self):
        answers = [said(chat(self.client, temperature=1, seed=s).choices[0].message) for s in (1, 1, 2)]
        self.assertEqual(answers[0], answers[1])
        self.assertNotEqual(answers[0], answers[2])

    def test_completions_from_text_and_tokens(self):
        for prompt in ("Once upon a time", [5, 6, 7, 8] * 40):
            options = dict(model=EXPECTED["model"], prompt=prompt, max_tokens=8, temperature=0)
            whole = self.client.completions.create(**options)
            stream = self.client.completions.create(stream=True, **options)
            streamed = "".join(c.choices[0].text for c in stream)
            self.assertEqual(whole.choices[0].text, streamed)
            self.assertEqual(whole.usage.completion_tokens, 8)

    def test_stop_string_cuts(self):
        options = dict(model=EXPECTED["model"], prompt="Once upon a time", max_tokens=12, temperature=0)
        whole = self.client.completions.create(**options).choices[0].text
        self.assertGreater(len(whole), 4)
        stop = whole[3:5]
        cut = self.client.completions.create(stop=[stop], **options)
        self.assertEqual(cut.choices[0].text, whole[:whole.index(stop)])
        self.assertEqual(cut.choices[0].finish_reason, "stop")

    def test_logprobs_in_both_shapes(self):
        content = chat(self.client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        self.assertEqual(len(content), TOKENS)
        for entry in content:
            self.assertEqual(len(entry.top_logprobs), 3)
            self.assertLessEqual(entry.logprob, 0)
            # Greedy: the chosen one is the likeliest.
            self.assertAlmostEqual(entry.logprob, entry.top_logprobs[0].logprob, places=5)
        legacy = self.client.completions.create(model=EXPECTED["model"], prompt="Once", max_tokens=5,
                                                temperature=0, logprobs=2).choices[0].logprobs
        for column in (legacy.tokens, legacy.token_logprobs, legacy.text_offset):
            self.assertEqual(len(column), 5)

    def test_tools_and_formats_are_taken(self):
        reply = chat(self.client, tools=TOOLS, tool_choice="auto", user="someone", store=False,
                     parallel_tool_calls=True, response_format={"type": "json_object"})
        self.assertGreater(reply.usage.prompt_tokens, chat(self.client).usage.prompt_tokens)

    def test_errors_are_the_classes_clients_expect(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            chat(self.client, temperature=3)
        self.assertEqual(raised.exception.param, "temperature")
        with self.assertRaises(openai.BadRequestError):
            chat(self.client, n=2)
        with self.assertRaises(openai.NotFoundError):
            chat(self.client, model="another")
        with self.assertRaises(openai.BadRequestError) as raised:
            self.client.completions.create(model=EXPECTED["model"], prompt=[1] * 100000, max_tokens=1)
        self.assertIn("context", str(raised.exception))

    def test_many_streams_at_once_are_each_right(self):
        async def one(client):
            stream = await chat(client, stream=True)
            text, reasoning = "", ""
            async for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            return text, reasoning

        async def all_of_them():
            async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", timeout=60) as client:
                return await asyncio.gather(*(one(client) for _ in range(8)))
        for answer in asyncio.run(all_of_them()):
            self.assertEqual(answer, (EXPECTED["text"], EXPECTED["reasoning"]))

    def test_leaving_a_stream_early(self):
        # A context of its own: no answer of this length ends by itself in the time the caller waits.
        with chat(self.client, stream=True, max_tokens=700, temperature=1,
                  extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))


if __name__ == "__main__":
    unittest.main()
