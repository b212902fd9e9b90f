"""A real Prometheus server scrapes every role of a mesh; promtool finds nothing to complain about."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import GOLDEN, Mesh, http_get, wait_until  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_linear_tiny")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class PrometheusTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="deltamesh-prometheus-")
        cls.mesh = Mesh(MODEL)
        targets = [{"targets": [p.ports()["http"]], "labels": {"process": name}}
                   for name, p in cls.mesh.processes.items()]
        with open(os.path.join(cls.folder, "prometheus.yml"), "w") as f:
            json.dump({"global": {"scrape_interval": "1s"},
                       "scrape_configs": [{"job_name": "deltamesh", "static_configs": targets}]}, f)
        cls.address = f"127.0.0.1:{free_port()}"
        cls.server = subprocess.Popen(
            ["prometheus", f"--config.file={cls.folder}/prometheus.yml",
             f"--storage.tsdb.path={cls.folder}/data", f"--web.listen-address={cls.address}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        cls.server.wait(10)
        cls.mesh.close()
        shutil.rmtree(cls.folder, ignore_errors=True)

    def query(self, expression):
        try:
            status, body = http_get(self.address, "/api/v1/query?query=" + urllib.parse.quote(expression))
        except OSError:
            return None
        if status == 503:   # it is starting
            return None
        return [(r["metric"], float(r["value"][1])) for r in json.loads(body)["data"]["result"]]

    def test_every_role_is_scraped_and_a_request_shows(self):
        wait_until(lambda: len(self.query("up == 1") or []) == len(self.mesh.processes), 30,
                   "Prometheus has scraped every process")
        self.mesh.generate(tokens=list(range(1, 131)), max_tokens=5)
        for expression in ('sum(deltamesh_tokens_total{kind="generated", process="decode-0"}) == 5',
                           'sum(deltamesh_handoffs_total{result="OK", process="decode-0"}) == 1',
                           'sum(deltamesh_ttft_seconds_count{process="router"}) >= 1'):
            wait_until(lambda: self.query(expression), 15, expression)

    def test_promtool_accepts_every_exposition(self):
        for name, process in self.mesh.processes.items():
            text = process.metrics().text
            done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True,
                                  text=True)
            self.assertEqual(done.returncode, 0, f"{name}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
