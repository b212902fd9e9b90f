"""Real processes over UCX on loopback: answers, failures, what every port offers."""
import json
import os
import random
import subprocess
import sys
import threading
import time
import unittest

import grpc

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from plain import plain_answers  # noqa: E402
from processes import BINARY, GOLDEN, Mesh, collect, health, http_get, pb_grpc, wait_until  # noqa: E402

VOCAB = 512   # ordinary tokens of the golden checkpoints
MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")
WORKER_FLAGS = ["--slabs=8", "--latent-blocks=64", "--context-tokens=1024", "--expert-seconds=3",
                "--chunk-tokens=80"]


PUBLISHED = 1   # seconds after which a process has surely published what it counted


def prompt(length, seed):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


class MeshTestCase(unittest.TestCase):
    prefill, decode, experts = 1, 1, 2
    cache_mib = 0
    flags = WORKER_FLAGS

    @classmethod
    def setUpClass(cls):
        cls.mesh = Mesh(MODEL, cls.prefill, cls.decode, cls.experts, cls.flags,
                        cache_mib=cls.cache_mib)

    @classmethod
    def tearDownClass(cls):
        cls.mesh.close()

    def compare(self, answer, plain):
        self.assertEqual(answer.tokens, plain["tokens"])
        self.assertEqual(answer.logprobs, plain["logprobs"])
        self.assertEqual(answer.finish.usage.completion_tokens, len(plain["tokens"]))

    def assert_unavailable(self, call):
        """Ends with UNAVAILABLE within a few seconds."""
        begin = time.monotonic()
        with self.assertRaises(grpc.RpcError) as raised:
            call()
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE,
                         raised.exception.details())
        self.assertLess(time.monotonic() - begin, 8)
        return raised.exception.details()


class ConnectionTest(unittest.TestCase):
    def test_each_connection_of_hand_offs_is_measured_and_a_slow_one_warned_of(self):
        for expected, event, other in [(0, "transport.bandwidth", "transport.slow"),
                                       (100_000_000, "transport.slow", "transport.bandwidth")]:
            flags = [*WORKER_FLAGS, f"--transport-expect-mb={expected}"]
            mesh = Mesh(MODEL, experts=1, worker_flags=flags)
            try:
                for n in (1, 2):
                    collect(mesh.stub.Generate(mesh.request(tokens=prompt(200, n), max_tokens=2)))
                prefill = mesh["prefill-0"]
                wait_until(lambda: event in prefill.tail(200), 20, f"{event} in the log")
                line, = [x for x in prefill.tail(200).splitlines() if event in x]
                self.assertIn("decode-0", line)
                self.assertNotIn(other, prefill.tail(200))
                wait_until(lambda: mesh.router.metrics().sum("deltamesh_links_measured") == 1, 20,
                           "the router knows")
                self.assertEqual(prefill.stop(), 0)
            finally:
                mesh.close()


class CacheTest(MeshTestCase):
    """With prefix caches answers keep their bits, and the usage tells what was not computed."""
    prefill, decode, experts = 2, 2, 2
    cache_mib = 64

    def test_repeated_and_continued_prompts(self):
        shared = prompt(300, 1)
        cases = [dict(tokens=shared + prompt(n, n), max_tokens=70, logprobs=2) for n in (1, 20, 64, 140)]
        cases += [dict(case) for case in cases]
        expected = plain_answers(MODEL, cases)
        told = []
        for case, plain in zip(cases, expected):
            answer = self.mesh.generate(**case)
            self.compare(answer, plain)
            told.append(answer.finish.usage.cached_tokens)
            time.sleep(0.3)   # what was kept is told to the router
        self.assertEqual(told[0], 0)
        for case, cached in zip(cases[4:], told[4:]):
            self.assertEqual(cached, (len(case["tokens"]) - 1) // 64 * 64)

        turn = dict(cases[0], tokens=cases[0]["tokens"] + expected[0]["tokens"] + prompt(30, 9))
        answer = self.mesh.generate(**turn)
        self.compare(answer, plain_answers(MODEL, [turn])[0])
        self.assertEqual(answer.finish.usage.cached_tokens, (len(cases[0]["tokens"]) + 69) // 64 * 64)
        time.sleep(PUBLISHED)
        router = self.mesh["router"].metrics()
        self.assertGreater(router.sum("deltamesh_placements_total", by="append"), 0)
        self.assertEqual(router.sum("deltamesh_cached_tokens_total"),
                         sum(told) + answer.finish.usage.cached_tokens)
        self.assertEqual(router.sum("deltamesh_prefix_unknown_workers"), 0)


class FetchTest(MeshTestCase):
    """A worker without room: another one fetches what it holds of the prompt, over UCX, and goes on."""
    prefill, decode, experts = 0, 2, 1
    cache_mib = 64
    flags = ["--slabs=1", "--latent-blocks=64", "--context-tokens=2048"]

    def fetched(self, worker, result="OK"):
        try:
            return self.mesh[worker].metrics().sum("deltamesh_fetches_total", result=result)
        except AssertionError:   # a refusal that never was has no series
            return 0

    def test_the_other_decode_worker_fetches_what_the_busy_one_holds(self):
        first = dict(tokens=prompt(300, 31), max_tokens=100, logprobs=2)
        plain = plain_answers(MODEL, [first])[0]
        self.compare(self.mesh.generate(**first), plain)
        time.sleep(PUBLISHED)
        said = {w: self.mesh[w].metrics().sum("deltamesh_tokens_total", kind="generated")
                for w in ("decode-0", "decode-1")}
        holder = max(said, key=said.get)
        other = "decode-0" if holder == "decode-1" else "decode-1"
        self.assertEqual(said[other], 0)

        session = first["tokens"] + plain["tokens"]
        busy = dict(tokens=session + prompt(20, 32), max_tokens=1200)
        turn = dict(tokens=session + prompt(33, 33), max_tokens=20, logprobs=2)
        expected = plain_answers(MODEL, [turn])[0]
        started, outcome = threading.Event(), []

        def run():
            outcome.append(self.mesh.generate(timeout=60, on_delta=lambda _: started.set(), **busy))
        thread = threading.Thread(target=run)
        thread.start()
        self.assertTrue(started.wait(20))
        answer = self.mesh.generate(**turn)
        self.assertTrue(thread.is_alive(), "the holder had no room all the while")
        thread.join()
        self.compare(answer, expected)
        held = 399 // 64 * 64
        self.assertEqual(answer.finish.usage.cached_tokens, held)
        time.sleep(PUBLISHED)
        self.assertEqual(self.fetched(other), 1)
        self.assertEqual(self.fetched(holder), 0)
        there, here = self.mesh[holder].metrics(), self.mesh[other].metrics()
        self.assertEqual(there.sum("deltamesh_fetches_served_total", result="OK"), 1)
        self.assertEqual(there.sum("deltamesh_fetch_served_bytes_total"),
                         here.sum("deltamesh_fetch_bytes_total"))
        self.assertEqual(here.sum("deltamesh_fetch_tokens_total"), held)
        router = self.mesh["router"].metrics()
        self.assertEqual(router.sum("deltamesh_fetch_results_total", reason="OK"), 1)
        self.assertEqual(router.sum("deltamesh_placements_total", by="fetch"), 1)
        self.assertEqual(router.sum("deltamesh_fetch_seconds_count", reason="OK"), 1)
        self.assertGreater(router.sum("deltamesh_fetch_seconds_sum", reason="OK"), 0)
        self.assertEqual(router.sum("deltamesh_fetch_bytes_sum", reason="OK"),
                         here.sum("deltamesh_fetch_bytes_total"))
        explained = subprocess.run([BINARY, "explain", "--last=2",
                                    f"--router={self.mesh['router'].ports()['grpc']}"],
                                   capture_output=True, text=True, check=True).stdout
        self.assertIn(f"{held} of them fetched from {holder}", explained)
        wait_until(self.mesh.idle, 5, "everything is given back")


class AnswersTest(MeshTestCase):
    prefill, decode, experts = 2, 2, 3

    CASES = [
        dict(tokens=prompt(3, 1), max_tokens=12, logprobs=2),
        dict(tokens=prompt(64, 2), max_tokens=12, logprobs=2),
        dict(tokens=prompt(65, 3), max_tokens=12, logprobs=2),
        dict(tokens=prompt(200, 4), max_tokens=12, logprobs=2),
        dict(tokens=prompt(333, 5), max_tokens=12, temperature=1.0, top_k=40, seed=11, logprobs=0),
        dict(tokens=prompt(130, 6), max_tokens=12, temperature=0.9, top_p=0.9, min_p=0.01,
             repetition_penalty=1.2, seed=12, logprobs=1),
    ]

    def test_equal_to_one_engine_bit_for_bit_one_by_one_and_together(self):
        expected = plain_answers(MODEL, self.CASES)
        for case, plain in zip(self.CASES, expected):
            self.compare(self.mesh.generate(**case), plain)
        answers = [None] * len(self.CASES)

        def run(i):
            answers[i] = self.mesh.generate(**self.CASES[i])
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(self.CASES))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for answer, plain in zip(answers, expected):
            self.compare(answer, plain)

        def handoffs():   # a worker publishes what it counted a moment later
            return sum(self.mesh[f"decode-{i}"].metrics().sum("deltamesh_handoffs_total", result="OK")
                       for i in range(2))
        wait_until(lambda: handoffs() >= 2 * 4, 3, "hand-offs of the four prompts longer than a block, twice")
        self.assertEqual(handoffs(), 2 * 4)

    def test_equal_to_the_generate_command(self):
        for case in self.CASES[2:]:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in
                     ({"temperature": 0.0} | case).items() if name not in ("tokens", "logprobs")]
            done = subprocess.run([BINARY, "generate", f"--model={MODEL}", "--ignore-eos", "--show-tokens",
                                   "--tokens=" + ",".join(map(str, case["tokens"])), *flags],
                                  capture_output=True, text=True, timeout=30, check=True)
            self.assertEqual(self.mesh.generate(**case).tokens, [int(t) for t in done.stdout.split(",")])

    def test_a_worker_with_other_activations_stays_out(self):
        other = self.mesh.add_worker("decode", 9, [*WORKER_FLAGS, "--activations=int8"])
        try:
            wait_until(lambda: "run the same model, --weights, --activations" in other.tail(100), 20,
                       "it is told why:\n" + other.tail())
            self.assertEqual(self.mesh["router"].metrics().sum("deltamesh_workers",
                                                               worker_role="decode"), 2)
        finally:
            other.kill()
            del self.mesh.processes[other.name]

    def test_bench_mesh_prints_the_rows_of_bench(self):
        def run(*args):
            return subprocess.run([BINARY, "bench-mesh", "--decode-steps=8", "--repetitions=2", *args],
                                  capture_output=True, text=True, timeout=60)
        # No hand-off: another test counts them.
        done = run("--router", self.mesh["router"].ports()["grpc"], "--prefill=60", "--sequences=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)["results"]
        self.assertEqual([(r["test"], r["n"], r["seqs"], len(r["runs"])) for r in rows],
                         [("prefill", 60, 1, 2), ("decode", 8, 1, 2)])
        self.assertTrue(all(rate > 0 for r in rows for rate in r["runs"]), rows)
        gone = run("--router=127.0.0.1:1")
        self.assertEqual(gone.returncode, 1)
        self.assertIn("--router: 127.0.0.1:1 does not answer", gone.stderr)

    def test_every_port_has_health_and_reflection_and_metrics(self):
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        for name, process in self.mesh.processes.items():
            ports = process.ports()
            self.assertEqual(health(ports["grpc"]), "SERVING", name)
            with grpc.insecure_channel(ports["grpc"]) as channel:
                call = channel.stream_stream(reflection)   # bytes in, bytes out
                listed = next(call(iter([b"\x3a\x00"]), timeout=5))   # list_services: ""
            self.assertIn(b"grpc.health.v1.Health", listed, name)
            if name == "router":
                self.assertIn(b"deltamesh.v1.Inference", listed)
            self.assertEqual(http_get(ports["http"], "/healthz")[0], 200, name)
            self.assertEqual(http_get(ports["http"], "/readyz")[0], 200, name)
            self.assertIn("deltamesh_", process.metrics().text, name)
            self.assertEqual(http_get(ports["http"], "/nothing")[0], 404, name)

    def test_every_role_logs_the_request_by_its_name(self):
        request = self.mesh.request(tokens=prompt(200, 17), max_tokens=3)
        request.request_id = "look-for-me"
        collect(self.mesh.stub.Generate(request, timeout=30))

        def named(role):
            lines = [line for name, process in self.mesh.processes.items() if name.split("-")[0] == role
                     for line in process.tail(200).splitlines()]
            return sum("request=look-for-me" in line for line in lines)
        for role, least in (("router", 1), ("prefill", 1), ("decode", 1), ("expert", self.experts)):
            wait_until(lambda: named(role) >= least, 5, f"{role} names the request")

    def test_metrics_count_what_happened(self):
        time.sleep(PUBLISHED)
        before = [self.mesh[f"decode-{i}"].metrics() for i in range(2)]
        self.mesh.generate(tokens=prompt(200, 7), max_tokens=10)
        time.sleep(PUBLISHED)
        wait_until(self.mesh.idle, 2, "pools back to baseline")
        after = [self.mesh[f"decode-{i}"].metrics() for i in range(2)]

        def grew(name, **labels):
            return sum(m.sum(name, **labels) for m in after) - \
                sum(m.sum(name, **labels) for m in before)
        self.assertEqual(grew("deltamesh_tokens_total", kind="generated"), 10)
        self.assertEqual(grew("deltamesh_tokens_total", kind="prompt"), 200 - 192)
        self.assertEqual(grew("deltamesh_requests_total", event="finished"), 1)
        self.assertEqual(grew("deltamesh_handoffs_total", result="OK"), 1)
        self.assertGreater(grew("deltamesh_handoff_bytes_total"), 10000)
        self.assertGreater(grew("deltamesh_step_seconds_count"), 0)
        self.assertGreater(grew("deltamesh_expert_calls_total"), 0)
        self.assertIn('kind="ucx"', after[0].text)
        self.assertGreater(self.mesh["expert-0"].metrics().sum("deltamesh_expert_rows_total"), 0)


class CancelTest(MeshTestCase):
    def test_a_client_that_leaves_frees_everything_within_a_second(self):
        for wait_for_token in (False, True):
            call = self.mesh.stub.Generate(
                self.mesh.request(tokens=prompt(300, 1), max_tokens=600), timeout=30)
            if wait_for_token:
                next(call)
            else:
                time.sleep(0.05)
            call.cancel()
            begin = time.monotonic()
            wait_until(self.mesh.idle, 3, "pools back to baseline")
            self.assertLess(time.monotonic() - begin, 1)

    def test_a_passed_deadline_frees_everything(self):
        with self.assertRaises(grpc.RpcError) as raised:
            self.mesh.generate(tokens=prompt(300, 1), max_tokens=700, timeout=0.1)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        wait_until(self.mesh.idle, 3, "pools back to baseline")

    def test_too_long_is_refused_before_any_work(self):
        for request in (dict(tokens=prompt(2000, 1)), dict(tokens=[10 ** 6]), dict(tokens=[])):
            with self.assertRaises(grpc.RpcError) as raised:
                self.mesh.generate(**request)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)


class LostWorkersTest(MeshTestCase):
    prefill, decode, experts = 2, 2, 2

    def setUp(self):
        self.heal()

    def heal(self):
        """Everything runs and serves, whatever was done to it."""
        for process in self.mesh.processes.values():
            if process.child.poll() is not None:
                process.restart(same_ports=process is self.mesh.router)
        self.mesh.wait_ready()
        # A process that was stopped does not know yet that it was taken for lost.
        want = dict(prefill=self.prefill, decode=self.decode, expert=self.experts)
        wait_until(lambda: all(self.mesh.router.metrics().sum("deltamesh_workers", worker_role=r) == n
                               for r, n in want.items()), 15, "all workers are registered")
        wait_until(lambda: not self.fails(99), 15, "the mesh serves")

    def long_answers(self, count):
        """`count` answers that run; [(thread, outcome)], outcome gets "answer" or "error"."""
        running = []
        for i in range(count):
            outcome, started = {}, threading.Event()

            def run(i=i, outcome=outcome, started=started):
                try:
                    outcome["answer"] = self.mesh.generate(
                        tokens=prompt(100, i), max_tokens=700, timeout=60,
                        on_delta=lambda _: started.set())
                except grpc.RpcError as e:
                    outcome["error"] = e
                started.set()
            thread = threading.Thread(target=run)
            thread.start()
            running.append((thread, outcome, started))
        for _, _, started in running:
            self.assertTrue(started.wait(20))
        return running

    def check_serves(self, seed):
        self.assertEqual(len(self.mesh.generate(tokens=prompt(200, seed), max_tokens=5).tokens), 5)

    def test_decode(self):
        running = self.long_answers(4)
        self.mesh["decode-0"].kill()
        killed = time.monotonic()
        lost = 0
        for thread, outcome, _ in running:
            thread.join(60)
            if "error" in outcome:
                lost += 1
                self.assertEqual(outcome["error"].code(), grpc.StatusCode.UNAVAILABLE)
            else:
                self.assertEqual(len(outcome["answer"].tokens), 700)
        self.assertIn(lost, (1, 2, 3))
        self.assertLess(time.monotonic() - killed, 60)
        self.check_serves(50)
        self.heal()

    def test_prefill(self):
        call = self.mesh.stub.Generate(self.mesh.request(tokens=prompt(900, 60), max_tokens=5), timeout=30)
        self.mesh["prefill-0"].kill()
        self.assertEqual(sum(len(e.delta.tokens) for e in call), 5)
        self.check_serves(61)
        self.heal()

    def test_expert(self):
        running = self.long_answers(2)
        self.mesh["expert-1"].kill()
        killed = time.monotonic()
        for thread, outcome, _ in running:
            thread.join(20)
            self.assertIn("error", outcome)
            self.assertEqual(outcome["error"].code(), grpc.StatusCode.UNAVAILABLE)
        self.assertLess(time.monotonic() - killed, 8)
        self.assert_unavailable(lambda: self.check_serves(70))
        self.heal()

    def test_hung_decode(self):
        """A process that is there but does nothing: only its silence shows it."""
        running = self.long_answers(4)
        hung = max((self.mesh[f"decode-{i}"] for i in range(self.decode)),
                   key=lambda p: p.metrics().sum("deltamesh_requests"))
        hung.pause()
        try:
            self.ends_within(8, running, allow_answers=True)
            self.check_serves(90)
        finally:
            hung.go_on()
        self.heal()
        wait_until(self.mesh.idle, 5, "pools back to baseline")

    def test_hung_expert(self):
        running = self.long_answers(1)
        self.mesh["expert-0"].pause()
        try:
            self.ends_within(8, running)
        finally:
            self.mesh["expert-0"].go_on()
        self.heal()

    def test_router(self):
        running = self.long_answers(2)
        self.mesh.router.kill()
        self.ends_within(5, running)
        wait_until(self.mesh.idle, 3, "pools back to baseline")
        self.heal()

    def fails(self, seed):
        try:
            self.check_serves(seed)
        except grpc.RpcError:
            return True
        return False

    def ends_within(self, seconds, running, allow_answers=False):
        begin, errors = time.monotonic(), 0
        for thread, outcome, _ in running:
            thread.join(60)
            if "error" in outcome:
                errors += 1
                self.assertEqual(outcome["error"].code(), grpc.StatusCode.UNAVAILABLE,
                                 outcome["error"].details())
            else:
                self.assertTrue(allow_answers)
        self.assertGreater(errors, 0)
        self.assertLess(time.monotonic() - begin, seconds)

    def test_term_drains(self):
        self.assertEqual(self.mesh["prefill-1"].stop(), 0)
        self.check_serves(80)


class RegistrationTest(unittest.TestCase):
    def test_two_routers_share_the_workers(self):
        mesh = Mesh(MODEL, worker_flags=WORKER_FLAGS, routers=2)
        try:
            case = dict(tokens=prompt(200, 3), max_tokens=20)
            first = mesh.generate(**case)
            with grpc.insecure_channel(mesh.routers[1].ports()["grpc"]) as channel:
                second = collect(pb_grpc.InferenceStub(channel).Generate(mesh.request(**case), timeout=20))
                self.assertEqual(first.tokens, second.tokens)
                mesh.router.kill()
                third = collect(pb_grpc.InferenceStub(channel).Generate(mesh.request(**case), timeout=20))
                self.assertEqual(first.tokens, third.tokens)
        finally:
            mesh.close()

    def test_another_model_is_refused_with_both_values(self):
        mesh = Mesh(MODEL, prefill=0, decode=1, experts=1, worker_flags=WORKER_FLAGS)
        try:
            other = os.path.join(GOLDEN, "kimi_linear_tiny")
            wrong = mesh.add("wrong", ["decode", f"--model={other}", "--name=wrong",
                                       f"--router={mesh.router.ports()['grpc']}"])
            wait_until(lambda: "FAILED_PRECONDITION" in wrong.tail(200), 20, "a refusal")
            self.assertIn("digest", wrong.tail(200))
            self.assertEqual(health(wrong.ports()["grpc"]), "NOT_SERVING")
            self.assertEqual(http_get(wrong.ports()["http"], "/readyz")[0], 503)
            self.assertEqual(len(mesh.generate(tokens=prompt(90, 1), max_tokens=3).tokens), 3)
        finally:
            mesh.close()

    def test_without_shards_a_router_is_not_ready_and_says_what_to_start(self):
        mesh = Mesh(MODEL, prefill=0, decode=1, experts=1, worker_flags=WORKER_FLAGS)
        try:
            lonely = mesh.add("lonely", ["router", f"--model={MODEL}", "--listen=127.0.0.1:0",
                                         "--http=127.0.0.1:0"])
            at = f"--router={lonely.ports()['grpc']}"
            mesh.add("bare", ["decode", f"--model={MODEL}", "--name=bare", at])
            said = wait_until(lambda: [text for status, text in [http_get(lonely.ports()["http"], "/readyz")]
                                       if status == 503 and "bare" in text], 30, "the worker is known")[0]
            self.assertIn("no expert shard is connected", said)
            self.assertIn("--local-experts", said)
            with grpc.insecure_channel(lonely.ports()["grpc"]) as channel:
                with self.assertRaises(grpc.RpcError) as refused:
                    collect(pb_grpc.InferenceStub(channel).Generate(mesh.request(tokens=[7]), timeout=20))
                self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
                self.assertIn("deltamesh expert", refused.exception.details())
                mesh.add("shard", ["expert", f"--model={MODEL}", "--name=shard", "--shard=0", "--shards=1",
                                   at])
                lonely.wait_ready()
                answer = collect(pb_grpc.InferenceStub(channel).Generate(
                    mesh.request(tokens=[7], max_tokens=3), timeout=20))
                self.assertEqual(len(answer.tokens), 3)
        finally:
            mesh.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
