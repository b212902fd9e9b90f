"""Sessions over real processes: what is suspended survives every process and goes on with the bits of a cold
run, over gRPC and in the terminal."""
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import grpc

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN, Mesh, collect, pb, post_json, wait_until  # noqa: E402

WORKER_FLAGS = ["--slabs=8", "--latent-blocks=128", "--context-tokens=2048", "--chunk-tokens=80"]
TEXT = "The quick brown fox jumps over the lazy dog, twice, and then once more. " * 3


class SessionTest(unittest.TestCase):
    family = "kimi_k3_tiny"

    def setUp(self):
        self.store = tempfile.mkdtemp(prefix="deltamesh-session-test-")
        self.mesh = None

    def tearDown(self):
        if self.mesh:
            self.mesh.close()
        shutil.rmtree(self.store)

    def start(self, **sizes):
        self.mesh = Mesh(os.path.join(GOLDEN, self.family), cache_mib=64,
                         worker_flags=[*WORKER_FLAGS, f"--store-dir={self.store}"], **sizes)

    def stop(self):
        """Every process ends."""
        for process in self.mesh.processes.values():
            self.assertEqual(process.stop(), 0, process.tail())
        self.mesh.close()
        self.mesh = None

    def request(self, append, text=None, tokens=None, session="trip", off=False):
        request = pb.GenerateRequest(append_to_session=append, logprobs=2)
        if text is not None:
            request.chat.messages.add(role="user", content=text)
        else:
            request.tokens.ids.extend(tokens)
        request.sampling.temperature = 0.9
        request.sampling.seed = 11
        request.stop.max_tokens = 40
        request.stop.ignore_eos = True
        if off:
            request.cache.off = True
        else:
            request.cache.session = session
        return request

    def run_turn(self, request):
        return collect(self.mesh.stub.Generate(request, timeout=60))

    def turn(self, text, append=True, session="trip"):
        """One turn, compared with a cold run of the same tokens."""
        answer = self.run_turn(self.request(append, text, session=session))
        after = self.get(session)
        self.assertEqual(answer.finish.session_tokens, after.tokens)
        self.assertEqual(list(after.token_ids[-len(answer.tokens):]), answer.tokens)
        prompt = after.token_ids[:-len(answer.tokens)]
        cold = self.run_turn(self.request(False, tokens=prompt, off=True))
        self.assertEqual(cold.finish.usage.cached_tokens, 0)
        self.assertEqual(answer.tokens, cold.tokens)
        self.assertEqual(answer.logprobs, cold.logprobs)
        return answer

    def get(self, session="trip"):
        return self.mesh.stub.GetSession(pb.GetSessionRequest(session=session, with_token_ids=True),
                                         timeout=30)

    def suspend(self, session="trip"):
        return self.mesh.stub.SuspendSession(pb.SuspendSessionRequest(session=session), timeout=60)

    def resume(self, session="trip"):
        return self.mesh.stub.ResumeSession(pb.ResumeSessionRequest(session=session), timeout=60)

    def fails(self, call, code):
        with self.assertRaises(grpc.RpcError) as raised:
            call()
        self.assertEqual(raised.exception.code(), code, raised.exception.details())
        return raised.exception.details()

    def post(self, status=200, **body):
        """A chat over HTTP."""
        got, reply = post_json(self.mesh.http(), "/v1/chat/completions",
                               {"max_tokens": 12, "ignore_eos": True, "temperature": 0, "session": "trip",
                                **body})
        self.assertEqual(got, status, reply)
        return reply

    @staticmethod
    def user(text):
        return [{"role": "user", "content": text}]

    def test_http_appends_to_the_sessions_of_grpc(self):
        self.start()
        error = self.post(404, messages=self.user("And?"), append_to_session=True)["error"]
        self.assertIn("is not known under this salt", error["message"])
        first = self.post(messages=self.user(TEXT))
        self.assertEqual(first["session_tokens"], self.get().tokens)
        second = self.post(messages=self.user("And then?"), append_to_session=True,
                           session_tokens=first["session_tokens"])
        after = self.get()
        self.assertEqual(second["session_tokens"], after.tokens)
        self.assertGreater(second["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        # What a cold run of the whole conversation says.
        answer = second["usage"]["completion_tokens"]
        prompt, said = after.token_ids[:-answer], after.token_ids[-answer:]
        cold = self.request(False, tokens=prompt, off=True)
        cold.sampling.temperature = 0
        cold.stop.max_tokens = answer
        self.assertEqual(self.run_turn(cold).tokens, list(said))
        # Its length is another now.
        error = self.post(400, messages=self.user("And?"), append_to_session=True,
                          session_tokens=first["session_tokens"])["error"]
        self.assertIn("session_tokens", error["message"])
        # Suspended over gRPC, gone on with over HTTP, after every process was restarted.
        self.suspend()
        self.stop()
        self.start()
        third = self.post(messages=self.user("Where were we?"), append_to_session=True)
        self.assertGreater(third["session_tokens"], second["session_tokens"])
        self.assertEqual(list(self.get().token_ids[:after.tokens]), list(after.token_ids))

    def test_a_name_begun_anew_stays_so(self):
        self.start()
        self.turn(TEXT, append=False)
        old = self.get().tokens
        self.suspend()
        self.turn("Something else", append=False)
        fresh = self.get()
        self.assertLess(fresh.tokens, old)
        self.stop()   # an orderly end waits until stores have it
        self.start()
        back = self.get()
        self.assertTrue(back.suspended)
        self.assertEqual(list(back.token_ids), list(fresh.token_ids))

    def test_survives_every_process_and_goes_on_elsewhere(self):
        self.start()
        self.turn(TEXT, append=False)
        self.turn("And then?")
        before = self.get()
        done = self.suspend()
        self.assertEqual(done.tokens, before.tokens)
        self.assertGreaterEqual(done.position, before.tokens - 128)
        self.assertEqual(done.tier, "disk")
        self.assertGreater(done.bytes, 0)
        self.assertTrue(self.get().suspended)
        self.stop()

        self.start(decode=2)
        self.assertTrue(self.get().suspended)
        resumed = self.resume()
        self.assertEqual((resumed.tokens, resumed.position, resumed.tier),
                         (before.tokens, done.position, "disk"))
        self.assertEqual(list(self.get().token_ids), list(before.token_ids))
        answer = self.turn("Where were we?")
        self.assertEqual(answer.finish.usage.cached_tokens, done.position)

        # By itself, and a fork of what rests.
        self.suspend()
        forked = self.mesh.stub.ForkSession(
            pb.ForkSessionRequest(session="trip", new_session="other"), timeout=30)
        answer = self.turn("Once more")
        self.assertGreaterEqual(answer.finish.usage.cached_tokens, forked.tokens - 128)
        self.turn("Another way", session="other")
        router = self.mesh.router
        wait_until(lambda: router.metrics().sum("deltamesh_session_events_total", event="resumed") == 2, 10,
                   "two were resumed")
        wait_until(lambda: router.metrics().sum("deltamesh_sessions") == 2, 10, "both live")

    def test_damaged_files_are_refused_and_computed_again(self):
        self.start()
        self.turn(TEXT, append=False)
        self.suspend()
        self.stop()
        for path in glob.glob(os.path.join(self.store, "**", "*.state"), recursive=True):
            spoil(path)
        self.start()
        self.assertEqual(self.resume().position, 0)
        answer = self.turn("Where were we?")
        self.assertEqual(answer.finish.usage.cached_tokens, 0)
        self.suspend()
        self.stop()
        records = glob.glob(os.path.join(self.store, "**", "*.record"), recursive=True)
        self.assertEqual(len(records), 1)
        spoil(records[0])
        self.start()
        self.fails(self.resume, grpc.StatusCode.DATA_LOSS)
        self.turn(TEXT, append=False)

    def test_names_salts_and_missing_stores(self):
        self.mesh = Mesh(os.path.join(GOLDEN, self.family), cache_mib=64, worker_flags=WORKER_FLAGS)
        self.turn("Hi", append=False)
        self.assertIn("--store-dir", self.fails(self.suspend, grpc.StatusCode.FAILED_PRECONDITION))
        self.fails(lambda: self.get("trap"), grpc.StatusCode.NOT_FOUND)
        self.fails(lambda: self.mesh.stub.GetSession(
            pb.GetSessionRequest(session="trip", salt="other"), timeout=30), grpc.StatusCode.NOT_FOUND)
        self.fails(lambda: self.run_turn(self.request(True, "Hi", session="trap")),
                   grpc.StatusCode.NOT_FOUND)


def spoil(path):
    with open(path, "r+b") as f:
        f.seek(-9, os.SEEK_END)
        byte = f.read(1)
        f.seek(-9, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))


class ChatTest(unittest.TestCase):
    """`deltamesh chat --session` through `deltamesh serve`, which is stopped in between."""

    def setUp(self):
        self.temp = tempfile.mkdtemp(prefix="deltamesh-session-chat-")
        self.child = None

    def tearDown(self):
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)
        shutil.rmtree(self.temp)

    def serve(self):
        self.lives = getattr(self, "lives", 0) + 1
        log = os.path.join(self.temp, f"log{self.lives}")
        with open(log, "wb") as out:
            self.child = subprocess.Popen(
                [BINARY, "serve", f"--model={os.path.join(GOLDEN, 'kimi_linear_tiny')}", "--grpc-port=0",
                 "--http-port=0", f"--store-dir={os.path.join(self.temp, 'store')}"],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": self.temp})

        def address():
            with open(log, errors="replace") as f:
                text = f.read()
            if self.child.poll() is not None:
                raise AssertionError(text)
            found = re.search(r"chat --router (\S+:\d+)", text)
            return found and "Ctrl-C stops everything" in text and found.group(1)
        return wait_until(address, 60, "serve is ready")

    def stop(self):
        self.child.send_signal(signal.SIGTERM)
        self.assertEqual(self.child.wait(20), 0)

    def chat(self, address, *lines):
        done = subprocess.run(
            [BINARY, "chat", f"--router={address}", "--session=trip", "--seed=5", "--temperature=0.8",
             "--max-tokens=70"], input="".join(line + "\n" for line in lines), capture_output=True,
            text=True, errors="replace", timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_goes_on_after_everything_was_stopped(self):
        first = self.chat(self.serve(), TEXT.strip(), "/fork twin", "/suspend")
        self.assertIn("(session trip is new)", first)
        stored = int(re.search(r"the state of (\d+) of them", first).group(1))
        self.assertGreater(stored, 0)
        tokens = int(re.search(r"\(session trip has (\d+) tokens", first).group(1))
        self.stop()
        second = self.chat(self.serve(), "And then?", "/session")
        self.assertIn(f"(session trip goes on after {tokens} tokens: {stored} of them restored from disk",
                      second)
        self.assertIn(f"{stored} cached", second)
        self.stop()


if __name__ == "__main__":
    unittest.main(verbosity=2)
