"""--help of every role: each flag says its unit, its default and its name in the environment."""
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN  # noqa: E402

ROLES = ("router", "prefill", "decode", "expert", "serve")
UNITS = ("seconds", "minutes", "bytes", "tokens", "threads", "requests", "sequences", "blocks", "attempts",
         "workers", "connections", "port", "shard", "inputs", "calls", "hand-offs", "experts", "records")


def flags(role):
    """[(flag, its line, its explanation)]"""
    text = subprocess.run([BINARY, role, "--help"], capture_output=True, text=True, check=True).stdout
    out = []
    for line in text.split("\n"):
        if re.match(r"  --[a-z]", line):
            head, _, rest = line.strip().partition("   ")
            out.append([head.split()[0].split(",")[0], head, rest.strip()])
        elif line.startswith("      ") and out:
            out[-1][2] += " " + line.strip()
    return out


class HelpTest(unittest.TestCase):
    def test_every_flag_says_all(self):
        for role in ROLES:
            found = flags(role)
            self.assertGreater(len(found), 8, role)
            for flag, head, text in found:
                with self.subTest(role=role, flag=flag):
                    self.assertIn("(Env:DELTAMESH_" + flag[2:].upper().replace("-", "_") + ")", head)
                    self.assertTrue(text)
                    if re.search(r" (TEXT|INT|UINT|FLOAT)", head):
                        self.assertTrue("REQUIRED" in head or "=" in head or "(default: " in text, head)
                    if re.search(r" (INT|UINT|FLOAT)", head):
                        self.assertTrue(any(u in flag or u in text for u in UNITS), f"{head}: no unit")

    def test_odd_numbers_are_refused_with_their_range(self):
        for flag, odd in (("--store-records", "0"), ("--store-gib", "nan"), ("--store-gib", "0"),
                          ("--store-after-seconds", "inf"), ("--cache-mib", "-1"), ("--threads", "1e3"),
                          ("--store-tenant-share", "nan"), ("--drain-seconds", "nan")):
            said = subprocess.run([BINARY, "decode", "--model=none", "--router=none:1", f"{flag}={odd}"],
                                  capture_output=True, text=True, timeout=30).stderr
            first = said.splitlines()[0]
            self.assertRegex(first, rf'^{flag}: "{odd}" is .*; use [0-9.e,-]+ to [0-9.e,+]+ [A-Za-z]')
            self.assertLess(len(first), 120, said)

    def test_explain_takes_no_empty_id_and_no_odd_time(self):
        for odd in (["--trace", ""], [""], ["--seconds=nan"], ["--seconds=0"]):
            done = subprocess.run([BINARY, "explain", *odd], capture_output=True, text=True, timeout=30)
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, r"^(--trace: is empty|request: is empty|--seconds: )")

    def test_environment_is_read_and_the_command_line_wins(self):
        model = os.path.join(GOLDEN, "kimi_k3_tiny")
        with tempfile.TemporaryDirectory() as folder:
            def failure(*args, **env):
                return subprocess.run([BINARY, "router", f"--model={model}", "--listen=127.0.0.1:0", *args],
                                      capture_output=True, text=True, timeout=30, cwd=folder,
                                      env={**os.environ, **env}).stderr
            self.assertIn('bad\\" is not host:port', failure(DELTAMESH_HTTP="bad"))
            self.assertIn('worse\\" is not host:port', failure("--http=worse", DELTAMESH_HTTP="bad"))

    def test_what_flags_say_is_checked_before_anything_is_loaded(self):
        model = os.path.join(GOLDEN, "kimi_linear_tiny")
        with tempfile.TemporaryDirectory() as folder:
            plain = os.path.join(folder, "plain")
            with open(plain, "w") as file:
                file.write("x")
            environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}

            def failure(role, *args):
                done = subprocess.run([BINARY, role, f"--model={model}", *args], capture_output=True,
                                      text=True, timeout=30, cwd=folder, env=environment)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertNotIn("model.load", done.stderr)
                return done.stderr
            for role in ("decode", "prefill"):
                worker = (role, "--router=127.0.0.1:1", "--local-experts")
                self.assertIn("--name: is missing", failure(*worker, "--store-s3=http://127.0.0.1:1/b"))
                self.assertIn("--name: is missing", failure(*worker, f"--store-dir={folder}"))
                self.assertIn("AWS_ACCESS_KEY_ID",
                              failure(*worker, "--name=w", "--store-s3=http://127.0.0.1:1/b"))
                self.assertIn("is not a folder", failure(*worker, "--name=w", f"--store-dir={plain}"))
                self.assertIn("--ports-file", failure(*worker, "--ports-file=nowhere/ports"))
            self.assertIn("--router", failure("expert", "--router=localhost"))
            self.assertIn("--name: byte 2 of", failure("router", "--listen=127.0.0.1:0", "--name=a b"))
            said = failure("router", "--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--live-requests=4",
                           "--waiting-requests=9")
            self.assertIn("--waiting-requests: 9 is above --live-requests, 4", said)
            self.assertIn("--lease-seconds: ", failure("router", "--listen=127.0.0.1:0", "--http=127.0.0.1:0",
                                                       "--lease-seconds=0.3"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
