"""`deltamesh bench-sessions` and `bench-disaggregation`, short: real meshes, every figure there."""
import json
import math
import os
import subprocess
import sys
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")


def run(*args):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=120)


class BenchSessionsTest(unittest.TestCase):
    def test_turns_on_a_long_prompt(self):
        done = run("bench-sessions", "--json", "--context=1000", "--append=300", "--repetitions=2")
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        figures = doc["figures"]
        self.assertEqual(len(figures), 20)
        for name, figure in figures.items():
            self.assertTrue(figure["runs"], name)
            self.assertTrue(all(math.isfinite(v) and v > 0 for v in figure["runs"]), (name, figure))
        # 1000 tokens: a snapshot at 960, of which the same prompt computes the rest.
        self.assertEqual(figures["same_prompt_not_restored"]["runs"], [40, 40])
        self.assertTrue(figures["same_prompt_not_restored"]["met"])
        self.assertEqual(figures["turn_not_restored"]["runs"], [340, 340])
        self.assertTrue(figures["turn_not_restored"]["met"])
        self.assertIn("met", figures["turn_over_engine_behind_and_handoff"])
        # Latents of what the turn before added, or of all, and one snapshot.
        self.assertLess(0, doc["fetched_bytes_of_a_turn"])
        self.assertLess(doc["fetched_bytes_of_a_turn"], doc["fetched_bytes_of_all"])

    def test_a_given_model_as_a_table(self):
        done = run("bench-sessions", f"--model={MODEL}", "--context=300", "--append=20", "--repetitions=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"its tokens that were computed again +44 tokens .* at most 64: met")
        self.assertRegex(done.stdout, r"turn / \(engine behind it .* at most 1.2: ")

    def test_ways_of_disaggregation_take_turns(self):
        done = run("bench-disaggregation", "--json", "--document-tokens=300", "--agent-tokens=300",
                   "--append-tokens=20", "--answer-tokens=3", "--turns=2", "--rounds=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual([w["workload"] for w in doc["workloads"]], ["documents", "agents", "chats"])
        for w in doc["workloads"]:
            rows = {row["disaggregation"]: row for row in w["rows"]}
            self.assertEqual(list(rows), ["planned", "always", "never"])
            self.assertEqual(rows["always"]["handed_over"], rows["always"]["requests"], w["workload"])
            self.assertEqual(rows["never"]["handed_over"], 0, w["workload"])
            for row in rows.values():
                self.assertEqual(row["requests"], 4)
                self.assertTrue(0 < row["ttft_mean"] <= row["completion_mean"], row)
            self.assertIn("loses", w["planned"])

    def test_what_cannot_be_measured(self):
        for args, message in ((("bench-sessions", "--context=100"), "context: 100 tokens; use 128 to"),
                              (("bench-sessions", "--append=0"), "append: 0 tokens; use 1 to"),
                              (("bench-disaggregation", "--clients=0"), "clients: 0; use 1 to 64"),
                              (("bench-disaggregation", "--chat-tokens=0"), "chat-tokens: 0; use 1 to")):
            done = run(*args)
            self.assertNotEqual(done.returncode, 0, args)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
