"""A recorded request becomes a span at a collector with OpenTelemetry's own protocol files."""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import GOLDEN, Mesh, wait_until  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.environ["DELTAMESH_VENV"]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def collector_python():
    """The interpreter of an environment with OpenTelemetry's protocol files, made when there is none."""
    python = os.path.join(VENV, "bin", "python")
    there = os.path.exists(python) and subprocess.run(
        [python, "-c", "import grpc, opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc"],
        stderr=subprocess.DEVNULL).returncode == 0
    if not there:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                        "opentelemetry-proto>=1.20,<2", "grpcio>=1.60"], check=True)
    return python


class TraceTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        address = os.path.join(folder.name, "address")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.said = open(os.path.join(folder.name, "spans"), "w+")
        self.addCleanup(self.said.close)
        self.collector = subprocess.Popen(
            [collector_python(), os.path.join(HERE, "otlp_collector.py"), address], env=environment,
            stdin=subprocess.PIPE, stdout=self.said, text=True)
        self.addCleanup(self.end_collector)
        self.endpoint = wait_until(lambda: os.path.exists(address) and open(address).read(), 30, "collector")
        self.mesh = Mesh(os.path.join(GOLDEN, "kimi_k3_tiny"), cache_mib=16,
                         router_flags=[f"--trace-endpoint={self.endpoint}"])
        self.addCleanup(self.mesh.close)

    def end_collector(self):
        self.collector.stdin.close()
        self.collector.wait(10)

    def spans(self):
        self.said.flush()
        self.said.seek(0)
        return [json.loads(line) for line in self.said if line.endswith("\n")]

    def complete(self, flags, **body):
        request = urllib.request.Request(
            f"http://{self.mesh.http()}/v1/completions",
            json.dumps({"prompt": [3 + i % 50 for i in range(200)], "max_tokens": 4, "ignore_eos": True,
                        "temperature": 0, **body}).encode(),
            {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.headers["traceresponse"], reply.headers["x-request-id"], json.loads(reply.read())

    def test_a_recorded_request_is_a_span_of_its_trace(self):
        begin = time.time_ns()
        self.complete("00")   # its client does not record it
        response, request_id, reply = self.complete("01")
        span = wait_until(self.spans, 10, "a span")[0]
        self.assertEqual((span["trace"], span["parent"]), (TRACE, PARENT))
        self.assertEqual(response, f"00-{TRACE}-{span['span']}-01")
        self.assertEqual((span["name"], span["scope"], span["kind"]), ("deltamesh.request", "deltamesh", 2))
        self.assertEqual(span["resource"]["service.name"], "deltamesh-router")
        said = span["attributes"]
        self.assertEqual(said["deltamesh.request"], request_id)
        self.assertEqual(said["gen_ai.usage.input_tokens"], 200)
        self.assertEqual(said["gen_ai.usage.output_tokens"], reply["usage"]["completion_tokens"])
        self.assertEqual(said["deltamesh.decode"], "decode-0")
        self.assertEqual(said["deltamesh.restored_tokens"],
                         reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.assertEqual(said["deltamesh.snapshot_tokens"], 192)   # the first request's
        self.assertGreater(len(said["deltamesh.candidates"]), 0)
        self.assertLess(begin, span["start"])
        self.assertLessEqual(span["start"], span["events"]["placed"])
        self.assertLessEqual(span["events"]["placed"], span["events"]["first_token"])
        self.assertLessEqual(span["events"]["first_token"], span["end"])
        self.assertLess(span["end"], time.time_ns())
        self.assertEqual(span["status"], 0)
        wait_until(lambda: self.mesh.router.metrics().sum("deltamesh_spans_total", result="exported") == 1,
                   5, "it is counted")
        self.assertEqual(len(self.spans()), 1)


if __name__ == "__main__":
    unittest.main()
