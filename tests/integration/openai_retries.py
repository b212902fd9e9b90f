"""The real `openai` package against a router that takes one request at a time: it comes again when it was
told to. Run by openai_test.py in an environment that has the package; DELTAMESH_BASE_URL and DELTAMESH_MODEL
tell where."""
import os
import threading
import time
import unittest

import openai

PROMPT = "Once upon a time"


class Retries(unittest.TestCase):
    def client(self, retries):
        """A client that notes when it asked, and what it was told to wait."""
        self.asked, self.told = [], []

        def on_response(response):
            if response.status_code == 429:
                self.told.append((time.monotonic(), float(response.headers["retry-after"]),
                                  float(response.headers["retry-after-ms"]) / 1000))
        http = openai.DefaultHttpxClient(event_hooks={
            "request": [lambda request: self.asked.append(time.monotonic())],
            "response": [on_response]})
        client = openai.OpenAI(base_url=os.environ["DELTAMESH_BASE_URL"], api_key="none", timeout=60,
                               max_retries=retries, http_client=http)
        self.addCleanup(client.close)
        return client

    def create(self, client, tokens, **more):
        return client.completions.create(model=os.environ["DELTAMESH_MODEL"], prompt=PROMPT,
                                         max_tokens=tokens, temperature=0,
                                         extra_body={"ignore_eos": True}, **more)

    def test_the_package_waits_as_long_as_it_is_told(self):
        long = self.create(self.client(0), 900, stream=True)
        next(iter(long))   # it runs
        with self.assertRaises(openai.RateLimitError) as raised:
            self.create(self.client(0), 2)
        self.assertGreaterEqual(int(raised.exception.response.headers["retry-after"]), 1)
        client = self.client(10)
        leave = threading.Timer(1.5, long.close)
        leave.start()
        self.addCleanup(leave.join)
        self.assertEqual(self.create(client, 2).usage.completion_tokens, 2)
        self.assertGreaterEqual(len(self.told), 1)
        self.assertEqual(len(self.asked), len(self.told) + 1)
        for (at, seconds, precise), again in zip(self.told, self.asked[1:]):
            self.assertGreater(precise, 0)
            self.assertLessEqual(precise, seconds)
            self.assertGreaterEqual(again - at, precise - 0.01)
            self.assertLess(again - at, precise + 2)   # and not by its own, longer and longer waits


if __name__ == "__main__":
    unittest.main()
