"""tools/bench/record.py: what was measured is kept, what cannot be is said before anything is measured."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN  # noqa: E402

RECORD = os.path.join(os.environ["DELTAMESH_SOURCE_DIR"], "tools", "bench", "record.py")
FLAGS = (f"--model={os.path.join(GOLDEN, 'kimi_k3_tiny')} --sections=decode --decode-steps=2 --repetitions=1 "
         "--roofline-seconds=0.002")


class RecordTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = os.path.join(self.folder.name, "r.md")

    def record(self, *args, out=None):
        return subprocess.run([sys.executable, RECORD, "--binary", BINARY, "--out", out or self.out, *args],
                              capture_output=True, text=True, timeout=60)

    def written(self):
        with open(self.out[:-2] + "json", encoding="utf-8") as f:
            return json.load(f)

    def test_what_was_measured_before_a_failure_is_kept(self):
        done = self.record("--run", f"good: {FLAGS}", "--run", "bad: --model=/nosuch",
                           "--run", f"late: {FLAGS}")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("exit code 1 of deltamesh bench", done.stderr)
        doc = self.written()
        self.assertEqual([r["label"] for r in doc["runs"]], ["good"])
        self.assertIn("exit code 1", doc["failed"])

    def test_other_load_stands_beside_both_engines(self):
        theirs = os.path.join(self.folder.name, "theirs.json")
        row = {"test": "decode", "n": 2, "depth": 0, "seqs": 1, "median_tps": 1.0}
        for more, clean in (({"others_max": 1.5}, False), ({}, None)):
            with open(theirs, "w", encoding="utf-8") as f:
                json.dump({"results": [{**row, **more}]}, f)
            done = self.record("--rounds=1", "--beside", f"both: {FLAGS} => cat {theirs}")
            self.assertEqual(done.returncode, 0, done.stderr)
            pair, = self.written()["beside"]
            self.assertIs(pair["clean"], clean)
            self.assertRegex(done.stdout, "not known|cores" if clean is None else "cores")

    def test_what_cannot_be_recorded(self):
        run = ("--run", f"a: {FLAGS}")
        for args, out, message in (
                ((), None, "nothing to measure"),
                (run, "/proc/r.md", "record: --out: "),
                (("--run=--sections=decode",), None, "use LABEL: FLAGS"),
                (("--run", "b: --curve 128"), None, "only speed can be recorded")):
            done = self.record(*args, out=out)
            self.assertNotEqual(done.returncode, 0, args)
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
            self.assertNotIn(" s: ", done.stderr if message != "only speed can be recorded" else "")
        self.assertEqual(os.listdir(self.folder.name), [])
        usage = subprocess.run([sys.executable, RECORD, "--help"], capture_output=True, text=True).stdout
        self.assertEqual(usage.count("record.py --out"), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
