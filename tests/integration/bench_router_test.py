"""`deltamesh bench-router`, briefly: every figure is there, with its bar. Nothing is said of their values."""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN  # noqa: E402

SHORT = ("--index-blocks=20000", "--prompt-tokens=2000", "--answer-tokens=20", "--requests=1",
         "--idle-workers=3", "--idle-seconds=0.3")


def bench(*args):
    return subprocess.run([BINARY, "bench-router", "--model=" + os.path.join(GOLDEN, "kimi_linear_tiny"),
                           *SHORT, *args], capture_output=True, text=True, timeout=60)


class BenchRouterTest(unittest.TestCase):
    def test_every_figure_has_its_bar(self):
        done = bench("--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        figures = json.loads(done.stdout)["router"]
        self.assertEqual(list(figures),
                         ["lookup_p99_us", "index_changes_per_second", "index_bytes_per_entry",
                          "index_growth_under_churn", "request_cpu_seconds",
                          "request_with_text_cpu_seconds", "request_over_http_cpu_seconds",
                          "request_among_others_cpu_seconds", "intake_cpu_seconds",
                          "intake_of_text_cpu_seconds", "intake_over_http_cpu_seconds", "idle_cores"])
        for name, figure in figures.items():
            self.assertTrue(math.isfinite(figure["value"]) and figure["value"] > 0, (name, figure))
            if name.startswith("intake"):   # a part of a request, without a bar of its own
                self.assertNotIn("bar", figure)
                continue
            self.assertGreater(figure["bar"], 0)
            self.assertIn(figure["met"], (True, False))

    def test_table(self):
        done = bench()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 12, done.stdout)

    def test_dev_calls_it(self):
        """With stand-ins for the tools that would build it."""
        dev = os.path.join(os.environ["DELTAMESH_SOURCE_DIR"], "dev")
        with tempfile.TemporaryDirectory() as folder:
            for name, says in (("cmake", ":"), ("ninja", ":"), ("dpkg-query", "echo installed"),
                               ("build/bin/deltamesh", 'echo "$@"')):
                path = os.path.join(folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as script:
                    script.write(f"#!/bin/sh\n{says}\n")
                os.chmod(path, 0o755)
            env = {**os.environ, "PATH": folder + ":" + os.environ["PATH"],
                   "DELTAMESH_BUILD": folder + "/build"}
            for asked, called in (("--router --model=m --requests=1", "bench-router --model=m --requests=1"),
                                  ("--model=m --json", "bench --model=m --json")):
                done = subprocess.run([dev, "bench", *asked.split()], capture_output=True, text=True,
                                      env=env, timeout=20)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.splitlines()[-1], called)


if __name__ == "__main__":
    unittest.main()
