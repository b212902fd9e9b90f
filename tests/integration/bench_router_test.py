"""`deltamesh bench-router`, briefly: every figure is there, with its bar. Nothing is said of their values."""
import json
import math
import os
import subprocess
import sys
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
                         ["lookup_p99_us", "index_changes_per_second", "index_bytes_per_block",
                          "index_growth_under_churn", "request_cpu_seconds",
                          "request_with_text_cpu_seconds", "idle_cores"])
        for name, figure in figures.items():
            self.assertTrue(math.isfinite(figure["value"]) and figure["value"] > 0, (name, figure))
            self.assertGreater(figure["bar"], 0)
            self.assertIn(figure["met"], (True, False))

    def test_table(self):
        done = bench()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 7, done.stdout)


if __name__ == "__main__":
    unittest.main()
