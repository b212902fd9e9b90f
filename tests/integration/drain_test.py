"""SIGTERM to a router: not ready at once, nothing new, running answers end within a bound, exit code 0."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import urllib.error
import urllib.request

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
import grpc  # noqa: E402
from processes import BINARY, GOLDEN, Mesh, Process, health, http_get, post_json, wait_until  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")


def prompt(count):
    return [3 + i % 50 for i in range(count)]


class Running:
    """An answer that has begun, over gRPC or over HTTP as a stream or as a whole."""

    def __init__(self, mesh, kind, tokens):
        self.mesh, self.kind, self.tokens = mesh, kind, tokens
        self.started, self.count, self.error = threading.Event(), 0, None
        self.thread = threading.Thread(target=getattr(self, kind))
        self.thread.start()

    def grpc(self):
        try:
            answer = self.mesh.generate(tokens=prompt(100), max_tokens=self.tokens, timeout=60,
                                        on_delta=lambda _: self.started.set())
            self.count = answer.finish.usage.completion_tokens
        except grpc.RpcError as e:
            self.error = (e.code(), e.details())

    def body(self, stream):
        return json.dumps({"prompt": prompt(100), "max_tokens": self.tokens, "ignore_eos": True,
                           "temperature": 0, "stream": stream,
                           **({"stream_options": {"include_usage": True}} if stream else {})}).encode()

    def open(self, stream):
        return urllib.request.urlopen(urllib.request.Request(
            f"http://{self.mesh.http()}/v1/completions", self.body(stream),
            {"content-type": "application/json"}), timeout=60)

    def stream(self):
        last = {}
        with self.open(True) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    self.started.set()
                    last = json.loads(line[6:])
        self.error = last.get("error")
        self.count = (last.get("usage") or {}).get("completion_tokens", 0)

    def whole(self):
        try:
            with self.open(False) as reply:
                self.count = json.loads(reply.read())["usage"]["completion_tokens"]
        except urllib.error.HTTPError as e:
            self.error = (e.code, json.loads(e.read())["error"]["message"])


class DrainTest(unittest.TestCase):
    def start(self, *router_flags):
        self.mesh = Mesh(MODEL, prefill=1, decode=1, experts=1, router_flags=router_flags)
        self.addCleanup(self.mesh.close)

    def begin(self, tokens):
        running = [Running(self.mesh, kind, tokens) for kind in ("grpc", "stream", "whole")]
        for r in running[:2]:
            self.assertTrue(r.started.wait(20), r.kind)
        decode = self.mesh["decode-0"]
        wait_until(lambda: decode.metrics().sum("deltamesh_requests") == 3, 10, "all three run")
        return running

    def test_running_answers_end_and_nothing_new_is_taken(self):
        self.start("--drain-seconds=30")
        ports = self.mesh.router.ports()
        running = self.begin(600)
        self.mesh.router.child.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        wait_until(lambda: http_get(ports["http"], "/readyz")[0] == 503, 1, "not ready")
        self.assertEqual(health(ports["grpc"]), "NOT_SERVING")
        self.assertEqual(http_get(ports["http"], "/healthz")[0], 200)
        status, reply = post_json(ports["http"], "/v1/completions", {"prompt": "Hi", "max_tokens": 1})
        self.assertEqual(status, 503, reply)
        self.assertIn("the router is draining", reply["error"]["message"])
        with self.assertRaises(grpc.RpcError) as raised:
            self.mesh.generate(tokens=prompt(5), max_tokens=1)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertIn("the router is draining", raised.exception.details())
        self.assertLess(time.monotonic() - asked, 2)
        self.assertTrue(all(r.thread.is_alive() for r in running), "over before the drain was looked at")
        for r in running:
            r.thread.join(60)
            self.assertIsNone(r.error, r.kind)
            self.assertEqual(r.count, 600, r.kind)
        self.assertEqual(self.mesh.router.child.wait(10), 0)
        self.assertIn("drain_seconds          30", self.mesh.router.tail(200))

    def test_what_is_not_over_within_the_bound_is_told_so(self):
        self.start("--drain-seconds=0.5")
        running = self.begin(1800)
        self.mesh.router.child.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        self.assertEqual(self.mesh.router.child.wait(10), 0)
        self.assertLess(time.monotonic() - asked, 0.5 + 2 * 1 + 2)   # drain, two flushes, and leeway
        for r in running:
            r.thread.join(10)
            self.assertIsNotNone(r.error, r.kind)
            self.assertIn("the router is stopping", str(r.error))
        self.assertEqual(running[0].error[0], grpc.StatusCode.UNAVAILABLE)
        self.assertEqual(running[1].error["type"], "server_error")
        self.assertEqual(running[2].error[0], 503)
        wait_until(self.mesh.idle, 5, "pools back to baseline")

    def test_inputs_that_are_being_read_at_the_end_harm_nobody(self):
        """Large inputs are on their way through the pool when the router is told to end at once."""
        body = {"messages": [{"role": "user", "content": "The quick brown fox. " * 20000}], "max_tokens": 1}
        for wait in (0.05, 0.2):
            self.start("--drain-seconds=0.01", "--encode-threads=2")
            ports, ended = self.mesh.router.ports(), []

            def ask(at=ports["http"], answers=ended):
                try:
                    answers.append(post_json(at, "/v1/chat/completions", body)[0])
                except (OSError, urllib.error.URLError) as e:
                    answers.append(str(e))
            clients = [threading.Thread(target=ask) for _ in range(8)]
            for c in clients:
                c.start()
            time.sleep(wait)
            self.mesh.router.child.send_signal(signal.SIGTERM)
            self.assertEqual(self.mesh.router.child.wait(30), 0, self.mesh.router.tail())
            for c in clients:
                c.join(30)
            self.assertEqual(len(ended), 8)
            self.mesh.close()

    def test_idle_ends_at_once(self):
        self.start()
        begin = time.monotonic()
        self.assertEqual(self.mesh.router.stop(), 0)
        self.assertLess(time.monotonic() - begin, 3)


class AddressTest(unittest.TestCase):
    """Where a router listens: names, IPv6, and what it cannot listen on."""

    def test_ipv6_and_names_serve(self):
        for host in ("localhost", "[::1]", "[::]"):
            if host != "localhost" and not self.has_ipv6():
                continue   # a machine without
            folder = tempfile.mkdtemp(prefix="deltamesh-test-")
            self.addCleanup(shutil.rmtree, folder)
            router = Process(folder, "router", ["router", f"--model={MODEL}", f"--listen={host}:0",
                                                f"--http={host}:0"])
            try:
                ports = router.ports()
                self.assertEqual(http_get(ports["http"], "/healthz")[0], 200, ports)
                self.assertEqual(health(ports["grpc"]), "NOT_SERVING", ports)   # there, without workers
            finally:
                router.kill()

    def test_workers_take_names_from_the_environment(self):
        named = dict(DELTAMESH_LISTEN="localhost:0", DELTAMESH_HTTP="localhost:0",
                     DELTAMESH_TRANSPORT_LISTEN="localhost", DELTAMESH_TRANSPORT_ADVERTISE="localhost")
        with unittest.mock.patch.dict(os.environ, named):
            mesh = Mesh(MODEL, experts=1)
            self.addCleanup(mesh.close)
            self.assertEqual(len(mesh.generate(tokens=list(range(100)), max_tokens=3).tokens), 3)
        for role in ("prefill-0", "decode-0", "expert-0"):
            ports = mesh[role].ports()
            self.assertTrue(all(at.startswith("localhost:") for at in ports.values()), ports)
            self.assertIn("transport.open", mesh[role].tail(200))
        for flag in ("--transport-listen", "--transport-advertise"):
            done = subprocess.run([BINARY, "decode", f"--model={MODEL}", "--router=localhost:1",
                                   f"{flag}=no.such.host.invalid"],
                                  capture_output=True, text=True, timeout=30)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(flag, done.stderr)
            self.assertIn("is no address of this machine", done.stderr)

    def test_bad_addresses_are_named_before_any_work(self):
        taken = socket.socket()
        self.addCleanup(taken.close)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address, words in (("nowhere", "is not host:port"), ("::1:80", "more than one colon"),
                               ("localhost:99999", "not a number from 0 to 65535"),
                               ("no.such.host.invalid:80", "is no address of this machine"),
                               ("192.0.2.1:0", "is no address of this machine"),
                               (f"127.0.0.1:{port}", "cannot be listened on")):
            for flag in ("--http", "--listen"):
                other = "--listen" if flag == "--http" else "--http"
                done = subprocess.run([BINARY, "router", f"--model={MODEL}", f"{other}=127.0.0.1:0",
                                       f"{flag}={address}"], capture_output=True, text=True, timeout=30)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(words, done.stderr)
                self.assertIn(f"{flag}: ", done.stderr)
                self.assertNotIn("deltamesh router\n", done.stderr)   # the table of bounds comes later

    def has_ipv6(self):
        try:
            with socket.socket(socket.AF_INET6) as s:
                s.bind(("::1", 0))
            return True
        except OSError:
            return False


if __name__ == "__main__":
    unittest.main(verbosity=2)
