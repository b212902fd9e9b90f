"""The shipped model over real processes: each answer is about the text of its own conversation, whatever way
its state took - handed over, found in a cache, suspended and resumed, computed again after a worker was
lost - and whatever else runs. A state that went astray would show in the answer."""
import concurrent.futures
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import grpc

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, Mesh, collect, pb, wait_until  # noqa: E402

ROOT = os.environ["DELTAMESH_SOURCE_DIR"]
MODEL = os.path.join(ROOT, "models", "reader")
AT_ONCE = (1, 2, 8)
ASKED = 24  # questions of each test
RIGHT_MIN = 22
RESTED_RIGHT_MIN = 6  # of the first 8, asked once more after the session's rest
# Tools with names, arguments and matters that no training text had.
TOOLS = [{"type": "function", "function": {
    "name": name, "description": about,
    "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}}}
    for name, key, about in (("read_mileage", "machine", "Current mileage of a machine"),
                             ("lookup_umbrella", "order", "Gives the deadline of an order"))]


def questions():
    with open(os.path.join(ROOT, "tests", "data", "reader", "questions.json"), encoding="utf-8") as f:
        return json.load(f)[:ASKED]


class ReaderTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.store = tempfile.mkdtemp(prefix="deltamesh-reader-test-")
        cls.mesh = Mesh(MODEL, decode=2, cache_mib=64, worker_flags=[
            "--slabs=24", "--latent-blocks=1024", "--chunk-tokens=128", f"--store-dir={cls.store}"])
        cls.questions = questions()
        cls.alone = [cls.ask(q, off=True).text for q in cls.questions]

    @classmethod
    def tearDownClass(cls):
        cls.mesh.close()
        shutil.rmtree(cls.store)

    @classmethod
    def request(cls, question, off=False, salt="", session="", then=None):
        request = pb.GenerateRequest()
        request.chat.thinking = False
        if then is None:
            for m in question["messages"]:
                request.chat.messages.add(role=m["role"], content=m["content"])
        else:
            request.chat.messages.add(role="user", content=then)
            request.append_to_session = True
        request.sampling.temperature = 0
        request.stop.max_tokens = 48
        request.cache.off = off
        request.cache.salt = salt
        request.cache.session = session
        return request

    @classmethod
    def ask(cls, question, **how):
        return collect(cls.mesh.stub.Generate(cls.request(question, **how), timeout=60))

    def ask_all(self, at_once, **how):
        """The answers, in order, with so many under way at any time."""
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda q: self.ask(q, **how), self.questions))

    def check(self, answers):
        self.assertEqual([a.text for a in answers], self.alone)

    def test_alone_most_answers_are_right(self):
        right = sum(text == q["answer"] for text, q in zip(self.alone, self.questions))
        self.assertGreaterEqual(right, RIGHT_MIN, self.alone)

    def test_calls_a_tool_that_it_never_saw(self):
        def answer(tool, messages):
            request = pb.GenerateRequest()
            request.chat.thinking = False
            request.chat.tools_json = json.dumps([tool])
            request.chat.messages.extend(messages)
            request.sampling.temperature = 0
            request.stop.max_tokens = 96
            events = list(self.mesh.stub.Generate(request, timeout=60))
            return ("".join(e.delta.text for e in events),
                    [(c.id, c.name, json.loads(c.arguments)) for e in events for c in e.delta.tool_calls])
        for tool, matter, about, result in (
                (TOOLS[0], "mileage", "Crilo", "4812"), (TOOLS[1], "deadline", "Vesox", "12 June")):
            function = tool["function"]
            key, = function["parameters"]["properties"]
            messages = [pb.ChatMessage(role="user", content=f"What is the {matter} of {about}?")]
            text, calls = answer(tool, messages)
            self.assertEqual((text, [c[1:] for c in calls]), ("", [(function["name"], {key: about})]))
            called = [{"id": calls[0][0], "type": "function", "function": {
                "name": calls[0][1], "arguments": json.dumps(calls[0][2])}}]
            messages += [pb.ChatMessage(role="assistant", tool_calls_json=json.dumps(called)),
                         pb.ChatMessage(role="tool", tool_call_id=calls[0][0], name=calls[0][1],
                                        content=result)]
            self.assertEqual(answer(tool, messages), (f"The {matter} of {about} is {result}.", []))

    def test_handed_over(self):
        for at_once in AT_ONCE:
            with self.subTest(at_once=at_once):
                before = self.mesh["prefill-0"].metrics().sum("deltamesh_handoff_bytes_total")
                answers = self.ask_all(at_once, off=True)
                self.check(answers)
                wait_until(lambda: self.mesh["prefill-0"].metrics().sum("deltamesh_handoff_bytes_total") >
                           before + ASKED * 100_000, 10, "the states went over")

    def test_found_in_a_cache(self):
        for at_once in AT_ONCE:
            with self.subTest(at_once=at_once):
                salt = f"tenant-{at_once}"
                self.check(self.ask_all(at_once, salt=salt))
                again = self.ask_all(at_once, salt=salt)
                self.check(again)
                for answer, question in zip(again, self.questions):
                    self.assertGreaterEqual(answer.finish.usage.cached_tokens, question["begin"] - 64)

    def test_suspended_and_resumed(self):
        stub = self.mesh.stub
        for at_once in AT_ONCE:
            with self.subTest(at_once=at_once), concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                def twice(i):
                    """The question, a rest on disk, and the question once more: it is about the same text."""
                    question, session = self.questions[i], f"reader-{at_once}-{i}"
                    again = question["messages"][-1]["content"].rsplit("\n", 1)[-1]
                    first = self.ask(question, session=session)
                    warm = self.ask(question, session=session, then=again)
                    stub.ForkSession(pb.ForkSessionRequest(session=session, new_session=session + "-fork"),
                                     timeout=60)
                    stub.SuspendSession(pb.SuspendSessionRequest(session=session), timeout=60)
                    stub.ResumeSession(pb.ResumeSessionRequest(session=session), timeout=60)
                    rested = self.ask(question, session=session, then=again)
                    kept = self.ask(question, session=session + "-fork", then=again)
                    return first, warm, rested, kept
                results = list(pool.map(twice, range(8)))
                self.assertEqual([r[0].text for r in results], self.alone[:8])
                for i, (_, _, rested, kept) in enumerate(results):
                    self.assertEqual(rested.tokens, kept.tokens, i)
                right = sum(r[2].text == q["answer"] for r, q in zip(results, self.questions))
                self.assertGreaterEqual(right, RESTED_RIGHT_MIN, [r[2].text for r in results])

    def test_computed_again_after_a_loss(self):
        for at_once in AT_ONCE:
            with self.subTest(at_once=at_once):
                with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                    under_way = [pool.submit(self.ask, q, off=True) for q in self.questions]
                    under_way[0].result()
                    self.mesh["prefill-0"].restart()
                    self.assertFalse(all(f.done() for f in under_way), "nothing was under way")
                    self.mesh["prefill-0"].wait_ready()
                    self.check([f.result() for f in under_way])

    def ask_until_answered(self, question, **how):
        """(answer, how often the call failed): as a client does that is told to try again."""
        for failed in range(50):
            try:
                return self.ask(question, **how), failed
            except grpc.RpcError as e:
                self.assertEqual(e.code(), grpc.StatusCode.UNAVAILABLE, e.details())
                time.sleep(0.2)
        self.fail("UNAVAILABLE for 10 s")

    def test_asked_again_after_all_decode_workers_were_killed(self):
        decode = [self.mesh[name] for name in ("decode-0", "decode-1")]
        for at_once in AT_ONCE:
            with self.subTest(at_once=at_once), concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                salt = f"killed-{at_once}"
                self.check(self.ask_all(at_once, salt=salt))  # what is lost with a worker was held there
                again = [pool.submit(self.ask_until_answered, q, salt=salt) for q in self.questions]
                again[0].result()
                for worker in decode:
                    worker.kill()
                for worker in decode:
                    worker.restart()
                    worker.wait_ready()
                answers, failed = zip(*(f.result() for f in again))
                self.check(answers)
                self.assertGreater(sum(failed), 0, "nothing was under way")


class NewcomerTest(unittest.TestCase):
    """Nobody names a model."""

    def run_it(self, *args, **more):
        env = {k: v for k, v in os.environ.items() if k not in ("DELTAMESH_MODEL", "DELTAMESH_ROUTER")}
        return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=120, env=env, **more)

    def test_chat_starts_a_mesh_of_its_own(self):
        text = "Here are my notes:\\\n* We meet Mara at 09:40.\\\n* The red boat belongs to Olof.\\\n\\\n"
        done = self.run_it("chat", "--temperature=0",
                           input=text + "Who owns the red boat?\nWhen is the meeting with Mara?\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"starting a mesh with \S*models/reader\b")
        self.assertIn("reader (kimi_k3", done.stdout)
        self.assertIn("The red boat belongs to Olof.", done.stdout)
        self.assertIn("The meeting with Mara is at 09:40.", done.stdout)

    def prompt_tokens(self, *flags, text="Hello\n"):
        done = self.run_it("chat", "--temperature=0", "--max-tokens=2", f"--model={MODEL}/", *flags,
                           input=text)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("reader (kimi_k3", done.stdout)
        return int(re.search(r"prompt (\d+) tokens", done.stdout)[1])

    def test_chat_thinks_as_the_model_does(self):
        unsaid, yes, no = (self.prompt_tokens(*flags) for flags in ([], ["--thinking"], ["--no-thinking"]))
        self.assertEqual(unsaid, yes)
        self.assertGreater(yes, no)

    def test_a_mesh_of_its_own_keeps_no_sessions(self):
        done = self.run_it("chat", "--session=notes", f"--model={MODEL}", input="Hello\n")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--session: kept by a mesh that goes on", done.stderr)

    def test_ctrl_c_drops_what_was_begun(self):
        main, other = pty.openpty()
        chat = subprocess.Popen([BINARY, "chat", "--temperature=0", "--max-tokens=2", f"--model={MODEL}"],
                                stdin=other, stdout=subprocess.PIPE, text=True, bufsize=1)
        try:
            out = iter(chat.stdout.readline, "")
            next(line for line in out if "reader (kimi_k3" in line)
            os.write(main, b"A secret note\\\n")
            time.sleep(0.3)
            chat.send_signal(signal.SIGINT)
            next(line for line in out if "leaves" in line)
            os.write(main, b"Hello\n")
            said = next(line for line in out if " tokens, " in line)
            self.assertEqual(int(re.search(r"prompt (\d+) tokens", said)[1]), self.prompt_tokens())
            os.write(main, b"/exit\n")
            self.assertEqual(chat.wait(30), 0)
        finally:
            chat.kill()
            chat.wait(10)
            chat.stdout.close()
            os.close(main)
            os.close(other)

    def test_generate(self):
        done = self.run_it("generate", "--chat=Hello", "--max-tokens=4")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("random weights", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
