"""Processes of a mesh for the integration tests: started from the built binary, on ports the system chooses.

Every wait has a limit; whatever a test leaves running is killed when its mesh is closed.
"""
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import grpc

from deltamesh.v1 import inference_pb2 as pb
from deltamesh.v1 import inference_pb2_grpc as pb_grpc
from health.v1 import health_pb2, health_pb2_grpc

BINARY = os.environ["DELTAMESH_BINARY"]
GOLDEN = os.environ["DELTAMESH_GOLDEN"]


def wait_until(condition, seconds, what):
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def http_get(address, path):
    """(status, body)"""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def health(address):
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return "UNREACHABLE"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


class Process:
    """One role, with its log and ports in the mesh's folder."""

    def __init__(self, folder, name, args):
        self.name, self.args, self.folder, self.lives = name, args, folder, 0
        self.child = None
        self.start()

    def start(self):
        self.lives += 1
        self.ports_file = os.path.join(self.folder, f"{self.name}.{self.lives}.ports")
        self.log = os.path.join(self.folder, f"{self.name}.{self.lives}.log")
        with open(self.log, "wb") as log:
            self.child = subprocess.Popen(
                [BINARY, *self.args, f"--ports-file={self.ports_file}", f"--parent={os.getpid()}"],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def ports(self, seconds=30):
        def read():
            if self.child.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.child.returncode}:\n{self.tail()}")
            if not os.path.exists(self.ports_file):
                return None
            with open(self.ports_file) as f:
                return dict(line.strip().split("=", 1) for line in f)
        self.known_ports = wait_until(read, seconds, f"{self.name} is up:\n{self.tail()}")
        return self.known_ports

    def tail(self, lines=15):
        with open(self.log, errors="replace") as f:
            return "".join(f.readlines()[-lines:])

    def wait_ready(self, seconds=30):
        address = self.ports(seconds)["grpc"]
        wait_until(lambda: health(address) == "SERVING", seconds, f"{self.name} is ready:\n{self.tail()}")

    def kill(self):
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def stop(self, seconds=10):
        """SIGTERM; the exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(seconds)

    def restart(self, same_ports=False):
        if same_ports:
            ports = self.known_ports
            self.args = [f"--listen={ports['grpc']}" if a.startswith("--listen=") else
                         f"--http={ports['http']}" if a.startswith("--http=") else a for a in self.args]
        if self.child.poll() is None:
            self.kill()
        self.start()

    def pause(self):
        self.child.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.child.send_signal(signal.SIGCONT)

    def metrics(self):
        status, text = http_get(self.ports()["http"], "/metrics")
        assert status == 200, text
        return Metrics(text)


class Metrics:
    """Series of one exposition by (name, labels); labels that are the same for all are left out."""

    def __init__(self, text):
        self.text = text
        self.values = {}
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            series, value = line.rsplit(" ", 1)
            self.values[series] = float(value)

    def sum(self, name, **labels):
        total, found = 0.0, False
        for series, value in self.values.items():
            base = series.split("{", 1)[0]
            if base == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total, found = total + value, True
        assert found, f"no series {name} {labels} in:\n{self.text}"
        return total


class Answer:
    def __init__(self):
        self.tokens, self.text, self.logprobs, self.finish = [], "", [], None
        self.first_at = None


class Mesh:
    def __init__(self, model, prefill=1, decode=1, experts=2, worker_flags=(), routers=1,
                 router_flags=(), cache_mib=0):
        """Without prefix caches unless told: then every request is computed, and pools empty out."""
        self.folder = tempfile.mkdtemp(prefix="deltamesh-test-")
        self.model = model
        self.processes = {}
        self.channel = None
        self.worker_flags = [*worker_flags, f"--cache-mib={cache_mib}"]
        try:
            self.routers = []
            for i in range(routers):
                name = "router" if i == 0 else f"router-{i}"
                self.routers.append(self.add(name, ["router", f"--model={model}", "--listen=127.0.0.1:0",
                                                    "--http=127.0.0.1:0", *router_flags]))
            self.router = self.routers[0]
            for i in range(experts):
                self.add_worker("expert", i, [f"--shard={i}", f"--shards={experts}"])
            for i in range(prefill):
                self.add_worker("prefill", i, self.worker_flags)
            for i in range(decode):
                self.add_worker("decode", i, self.worker_flags)
            self.wait_ready()
            self.channel = grpc.insecure_channel(self.router.ports()["grpc"])
            self.stub = pb_grpc.InferenceStub(self.channel)
        except BaseException:
            self.close()
            raise

    def add(self, name, args):
        self.processes[name] = Process(self.folder, name, args)
        return self.processes[name]

    def add_worker(self, role, index, more):
        router = ",".join(r.ports()["grpc"] for r in self.routers)
        return self.add(f"{role}-{index}", [role, f"--model={self.model}", f"--router={router}",
                                            f"--name={role}-{index}", "--drain-seconds=3", *more])

    def __getitem__(self, name):
        return self.processes[name]

    def wait_ready(self):
        for process in self.processes.values():
            process.wait_ready()

    def http(self):
        return self.router.ports()["http"]

    def request(self, tokens=None, text=None, max_tokens=16, temperature=0.0, seed=None, logprobs=None,
                ignore_eos=True, **sampling):
        request = pb.GenerateRequest()
        if tokens is not None:
            request.tokens.ids.extend(tokens)
        else:
            request.text = text
        request.sampling.temperature = temperature
        for name, value in sampling.items():
            setattr(request.sampling, name, value)
        if seed is not None:
            request.sampling.seed = seed
        if logprobs is not None:
            request.logprobs = logprobs
        request.stop.max_tokens = max_tokens
        request.stop.ignore_eos = ignore_eos
        return request

    def generate(self, timeout=30, on_delta=None, **request):
        return collect(self.stub.Generate(self.request(**request), timeout=timeout), on_delta)

    def idle(self):
        """No worker holds a slab, a block or a request; what a prefix cache would give up does not count."""
        for name, process in self.processes.items():
            if process.child.poll() is not None or name.split("-")[0] not in ("prefill", "decode"):
                continue
            m = process.metrics()
            if m.sum("deltamesh_requests") or \
                    m.sum("deltamesh_pool_slots") != m.sum("deltamesh_pool_free_slots") + \
                    m.sum("deltamesh_pool_reclaimable_slots"):
                return False
        return True

    def close(self):
        if self.channel is not None:
            self.channel.close()
        for process in self.processes.values():
            if process.child.poll() is None:
                process.child.kill()
            process.child.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def collect(call, on_delta=None):
    answer = Answer()
    for event in call:
        if event.HasField("delta"):
            answer.first_at = answer.first_at or time.monotonic()
            answer.tokens.extend(event.delta.tokens)
            answer.text += event.delta.text
            answer.logprobs.extend(info.chosen.logprob for info in event.delta.infos)
            if on_delta:
                on_delta(answer)
        elif event.HasField("finish"):
            answer.finish = event.finish
    return answer


def post_json(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as r:
            return r.status, json.loads(r.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())
