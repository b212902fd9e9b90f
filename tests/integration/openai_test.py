"""Starts a mesh and runs openai_client.py, which uses the real package, against it; then curl."""
import json
import os
import re
import subprocess
import sys
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from deltamesh.v1 import inference_pb2 as pb  # noqa: E402
from processes import GOLDEN, Mesh, wait_until  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.environ["DELTAMESH_VENV"]
MODEL = "kimi_k3_tiny"
MESSAGES = [{"role": "system", "content": "You are a mesh."},
            {"role": "user", "content": "What is a hand-off? Say it in one short sentence, please."}]


def client_python():
    """The interpreter of an environment that has the openai package, made when there is none yet."""
    python = os.path.join(VENV, "bin", "python")
    there = os.path.exists(python) and subprocess.run(
        [python, "-c", "import openai"], stderr=subprocess.DEVNULL).returncode == 0
    if not there:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                        "openai>=1.40,<3"], check=True)
    return python


class OpenAiTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mesh = Mesh(os.path.join(GOLDEN, MODEL),
                        worker_flags=["--slabs=8", "--latent-blocks=128", "--context-tokens=1024"],
                        cache_mib=64)

    @classmethod
    def tearDownClass(cls):
        cls.mesh.close()

    def expected(self):
        """The greedy answer as gRPC gives it."""
        request = pb.GenerateRequest()
        for m in MESSAGES:
            request.chat.messages.add(role=m["role"], content=m["content"])
        request.sampling.temperature = 0
        request.stop.max_tokens = 24
        text, reasoning = "", ""
        for event in self.mesh.stub.Generate(request, timeout=30):
            text += event.delta.text
            reasoning += event.delta.reasoning
        return {"model": MODEL, "text": text, "reasoning": reasoning}

    def test_the_openai_package_works_unchanged(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI"))}
        environment.update(DELTAMESH_BASE_URL=f"http://{self.mesh.http()}/v1",
                           DELTAMESH_EXPECTED=json.dumps(self.expected()),
                           DELTAMESH_MESSAGES=json.dumps(MESSAGES), PYTHONDONTWRITEBYTECODE="1")
        run = subprocess.run([client_python(), os.path.join(HERE, "openai_client.py"), "-v"],
                             env=environment, timeout=150, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("OK", run.stderr)
        wait_until(self.mesh.idle, 1.5, "what the client left early is free again")

    def test_the_openai_package_honours_retry_after(self):
        mesh = Mesh(os.path.join(GOLDEN, MODEL), router_flags=["--live-requests=1", "--waiting-requests=1"],
                    worker_flags=["--slabs=8", "--latent-blocks=128", "--context-tokens=1024"])
        self.addCleanup(mesh.close)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI"))}
        environment.update(DELTAMESH_BASE_URL=f"http://{mesh.http()}/v1", DELTAMESH_MODEL=MODEL,
                           PYTHONDONTWRITEBYTECODE="1")
        run = subprocess.run([client_python(), os.path.join(HERE, "openai_retries.py"), "-v"],
                             env=environment, timeout=120, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("OK", run.stderr)

    def test_curl_streams(self):
        run = subprocess.run(
            ["curl", "-sN", "--max-time", "30", f"http://{self.mesh.http()}/v1/chat/completions",
             "-H", "content-type: application/json", "-d",
             json.dumps({"messages": MESSAGES, "max_tokens": 5, "stream": True})],
            capture_output=True, text=True, timeout=40)
        self.assertEqual(run.returncode, 0, run.stderr)
        lines = [line for line in run.stdout.splitlines() if line]
        self.assertEqual(lines[-1], "data: [DONE]")
        for line in lines[:-1]:
            self.assertEqual(json.loads(line.removeprefix("data: "))["object"], "chat.completion.chunk")

    def test_every_series_is_documented_and_every_documented_one_exists(self):
        self.expected()   # something to count
        with open(os.path.join(HERE, "../../services/common/METRICS.md"), encoding="utf-8") as f:
            documented = set(re.findall(r"^\| `(deltamesh_[a-z_]+)`", f.read(), re.M))
        exposed = set()

        def all_there():   # a router publishes what it counted a moment later
            for process in self.mesh.processes.values():
                exposed.update(re.findall(r"^# TYPE (\S+)", process.metrics().text, re.M))
            return documented <= exposed
        try:
            wait_until(all_there, 3, "every documented series")
        except AssertionError:
            self.assertEqual(documented - exposed, set())
        self.assertEqual(exposed - documented, set())


if __name__ == "__main__":
    unittest.main()
