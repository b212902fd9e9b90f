"""`deltamesh bench`: every row is there, with a ceiling that the same run measured."""
import json
import math
import os
import subprocess
import sys
import time
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN, wait_until  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")
SHORT = ("--prefill=70", "--sequences=2", "--depths=64", "--decode-steps=4", "--repetitions=1",
         "--handoff-mib=1", "--handoff-moved-mib=4", "--roofline-seconds=0.005")


def bench(*args, **env):
    return subprocess.run([BINARY, "bench", f"--model={MODEL}", *args], capture_output=True, text=True,
                          timeout=60, env={**os.environ, **env})


def parent(pid):
    """0 when it has ended, whether somebody has waited for it or not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state, ppid = stat.read().rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(ppid)


def children(pid):
    return {int(p) for p in os.listdir("/proc") if p.isdigit() and parent(p) == pid}


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
                          ("decode", 4, 64, 1), ("mesh-prefill", 70, 0, 1), ("mesh-decode", 4, 0, 1),
                          ("mesh-prefill-2-shards", 70, 0, 1), ("mesh-decode-2-shards", 4, 0, 1)])
        for row in doc["results"]:
            self.check(row, "tps")
        self.assertEqual([(r["test"], r["n"], r["seqs"]) for r in doc["handoff"]],
                         [("handoff", 1 << 20, 1), ("handoff", 1 << 20, 4)])
        for row in doc["handoff"]:
            self.check(row, "gbs")
        self.assertGreater(doc["start_seconds"], 0)
        self.assertGreater(doc["start_resident_bytes"], 0.5 * doc["model_bytes"])
        self.assertTrue(all(math.isfinite(v) and v > 0 for v in doc["ceilings"].values()), doc["ceilings"])

    def test_table_of_some_sections_without_ucx_perftest(self):
        done = bench("--sections=decode,handoff", *SHORT, PATH="")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split()[0] for line in done.stdout.splitlines()[4:] if not line.startswith("*")]
        self.assertEqual(rows, ["decode", "handoff", "handoff"], done.stdout)
        self.assertIn("% of a TCP connection", done.stdout)
        self.assertIn("% of read bandwidth", done.stdout)

    def test_what_it_started_ends_with_it(self):
        whole = subprocess.Popen([BINARY, "bench", f"--model={MODEL}", "--sections=handoff",
                                  "--roofline-seconds=0", "--handoff-mib=64", "--repetitions=100000"],
                                 stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: len(children(whole.pid)) > 0, 20, "the other end of a hand-off")
            seen = set()
            for _ in range(20):  # the other end of the hand-off, and both of ucx_perftest where there is one
                seen |= children(whole.pid)
                time.sleep(0.05)
        finally:
            whole.kill()
            whole.wait(10)
        wait_until(lambda: not any(parent(pid) for pid in seen), 5, f"the end of {seen}")

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

    def test_curve_of_a_long_prompt(self):
        done = subprocess.run([BINARY, "bench", "--curve=128,1k,2k", "--json", "--memory-mib=2048"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual([p["length"] for p in doc["curve"]], [128, 1024, 2048])
        for p in doc["curve"]:
            self.assertTrue(0 < p["kda_us_per_token"] < p["us_per_token"], p)
            self.assertLess(p["peak_resident_bytes"], 2048 << 20)
        self.assertEqual(doc["curve"][2]["cache_bytes"] - doc["curve"][1]["cache_bytes"],
                         1024 * 4 * (16 + 16))
        done = bench("--curve=64k", "--fill", "--json", "--chunk-tokens=1024")
        self.assertEqual(done.returncode, 0, done.stderr)
        point, = json.loads(done.stdout)["curve"]
        self.assertEqual(point["window"], 4096)
        self.assertIn("64k: ", done.stderr)
        done = bench("--curve=1k", "--memory-mib=1")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("memory-mib: 1; ", done.stderr)

    def test_hybrid_against_full(self):
        done = subprocess.run([BINARY, "bench", "--hybrid-vs-full", "--contexts=16k,512", "--json",
                               "--hybrid-steps=2"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        short, long = doc["results"]
        self.assertEqual((short["context"], long["context"]), (512, 16384))
        # 8 layers against 2 and the state of 6, all float32.
        self.assertEqual(long["full"]["cache_bytes"], 8 * 96 * 4 * 16384)
        state = 6 * (4 * 64 * 64 + 3 * 3 * 256 + 256 + 2 * 16 * 256)
        self.assertEqual(long["hybrid"]["cache_bytes"], 4 * (2 * 96 * 16384 + state))
        self.assertGreater(long["cache_less"], 0.7)
        for check in doc["fill_check"].values():
            self.assertTrue(check["filled_ms"] > 0 and check["computed_ms"] > 0, check)
        done = bench("--hybrid-vs-full", "--contexts=100")
        self.assertIn("contexts: 100; use multiples of 64", done.stderr)

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
