"""`deltamesh bench`: every row is there, with a ceiling that the same run measured."""
import json
import math
import os
import subprocess
import sys
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")
SHORT = ("--prefill=70", "--sequences=2", "--depths=64", "--decode-steps=4", "--repetitions=1",
         "--handoff-mib=1", "--handoff-moved-mib=4", "--roofline-seconds=0.005")


def bench(*args, **env):
    return subprocess.run([BINARY, "bench", f"--model={MODEL}", *args], capture_output=True, text=True,
                          timeout=60, env={**os.environ, **env})


class BenchTest(unittest.TestCase):
    def check(self, row, unit):
        self.assertEqual(len(row["runs"]), 1, row)
        self.assertTrue(row["ceiling"], row)
        for value in (row["median_" + unit], *row["runs"], row["ceiling_" + unit],
                      row["fraction_of_ceiling"]):
            self.assertTrue(math.isfinite(value) and value > 0, row)

    def test_every_row(self):
        done = bench("--json", *SHORT)
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual([(r["test"], r["n"], r["depth"], r["seqs"]) for r in doc["results"]],
                         [("prefill", 70, 0, 1), ("decode", 4, 0, 1), ("decode", 4, 0, 2),
                          ("decode", 4, 64, 1), ("mesh-prefill", 70, 0, 1),
                          ("mesh-decode", 4, 0, 1)])
        for row in doc["results"]:
            self.check(row, "tps")
        self.assertEqual([(r["test"], r["n"], r["seqs"]) for r in doc["handoff"]],
                         [("handoff", 1 << 20, 1), ("handoff", 1 << 20, 4)])
        for row in doc["handoff"]:
            self.check(row, "gbs")
        self.assertTrue(all(math.isfinite(v) and v > 0 for v in doc["ceilings"].values()), doc["ceilings"])

    def test_table_of_some_sections_without_ucx_perftest(self):
        done = bench("--sections=decode,handoff", *SHORT, PATH="")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split()[0] for line in done.stdout.splitlines()[3:] if not line.startswith("*")]
        self.assertEqual(rows, ["decode", "handoff", "handoff"], done.stdout)
        self.assertIn("% of a TCP connection", done.stdout)
        self.assertIn("% of median read bandwidth", done.stdout)

    def test_int8_activations_through_the_mesh(self):
        done = bench("--sections=mesh", "--json", "--activations=int8", *SHORT)
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual(doc["activations"], "int8")
        for row in doc["results"]:
            self.check(row, "tps")

    def test_quality_of_narrow_modes(self):
        def quality(*args):
            done = bench(f"--quality={__file__}", "--quality-tokens=100", "--json", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            doc = json.loads(done.stdout)
            self.assertTrue(0 < doc["logit_relative_rms"] < 0.5, doc)
            self.assertTrue(0.5 < doc["top1_agreement"] <= 1, doc)
            return doc["weights"], doc["activations"]
        self.assertEqual(quality(), ("8bit", "float"))
        self.assertEqual(quality("--activations=int8"), ("stored", "int8"))
        self.assertEqual(quality("--activations=int8", "--weights=8bit"), ("8bit", "int8"))

    def test_a_lesser_cpu(self):
        def system(*args, **env):
            done = bench("--sections=decode", "--json", *SHORT, *args, **env)
            return json.loads(done.stdout)["system"] if done.returncode == 0 else done.stderr
        best = system()
        self.assertEqual(system("--cpu-target=" + best.lower()), best)
        self.assertIn("--cpu-target: SSE4 is not known or not of this CPU; use " + best,
                      system(DELTAMESH_CPU_TARGET="sse4"))

    def test_what_cannot_be_measured(self):
        for flag, message in (("--depths=100", "depths: 100; use multiples of 64"),
                              ("--handoff-mib=0", "handoff-mib: 0; use 1 to"),
                              ("--sections=speed", "--sections"),
                              ("--prefill=0", "prefill: 0 tokens; use at least 1")):
            done = bench("--sections=handoff", "--roofline-seconds=0", *SHORT[3:5], flag)
            self.assertNotEqual(done.returncode, 0, flag)
            self.assertIn(message, done.stderr + done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
