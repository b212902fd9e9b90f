"""`deltamesh serve`: comes up, shows an answer, stops cleanly, reports a child that died."""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, GOLDEN, http_get, post_json, wait_until  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_k3_tiny")


def children_of(pid):
    out = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    fields = f.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                out.append(int(entry))
    return out


def command_line(pid):
    with open(f"/proc/{pid}/cmdline") as f:
        return f.read()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class ServeTest(unittest.TestCase):
    def setUp(self):
        self.temp = tempfile.mkdtemp(prefix="deltamesh-serve-test-")
        self.out = os.path.join(self.temp, "out")
        self.child = None

    def tearDown(self):
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)
        subprocess.run(["rm", "-rf", self.temp], check=True)

    def start(self, *flags):
        with open(self.out, "wb") as out:
            self.child = subprocess.Popen(
                [BINARY, "serve", f"--model={MODEL}", "--grpc-port=0", "--http-port=0", *flags],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": self.temp})

    def text(self):
        with open(self.out, errors="replace") as f:
            return f.read()

    def wait_for(self, words, seconds=40):
        def there():
            if words in self.text():
                return True
            if self.child.poll() is not None:
                raise AssertionError(f"serve ended with {self.child.returncode}:\n{self.text()}")
            return False
        wait_until(there, seconds, f"{words!r} in the output:\n{self.text()}")

    def assert_nothing_left(self, pids):
        wait_until(lambda: not any(alive(p) for p in pids), 10, "all processes are gone")
        left = [n for n in os.listdir(self.temp) if n != "out"]
        self.assertEqual(left, [])

    def test_comes_up_answers_and_leaves_nothing_behind(self):
        self.start("--first-answer=What is a mesh?", "--first-answer-tokens=8")
        self.wait_for("Ctrl-C stops everything")
        text = self.text()
        for words in ("ready ", "curl ", f"{os.path.realpath(BINARY)} call --router ",
                      f"{os.path.realpath(BINARY)} chat --router ",
                      "prompt tokens", "8 answer tokens"):
            self.assertIn(words, text)
        http = re.search(r"http://([\d.]+:\d+)/v1 ", text).group(1)
        self.assertEqual(http_get(http, "/readyz")[0], 200)
        status, reply = post_json(http, "/v1/chat/completions",
                                  {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4})
        self.assertEqual(status, 200, reply)
        self.assertEqual(reply["usage"]["completion_tokens"], 4)
        self.paste_what_it_shows(text)
        pids = children_of(self.child.pid)
        self.assertEqual(len(pids), 5)
        self.child.send_signal(signal.SIGINT)
        self.assertEqual(self.child.wait(15), 0)
        self.assert_nothing_left(pids)

    def paste_what_it_shows(self, text):
        """Each call under "try" works as it stands, with what a fresh machine has."""
        shown = text.split("\ntry\n", 1)[1].split("\n\n", 1)[0]
        commands = [c.strip() for c in shown.replace("\\\n", " ").split("\n")]
        self.assertEqual(len(commands), 3, shown)
        for command, words in zip(commands, ("data: [DONE]", '"finish":', "first after")):
            done = subprocess.run(["bash", "-c", command], input="Hello\n", capture_output=True, text=True,
                                  timeout=60)
            self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}{done.stderr}")
            self.assertIn(words, done.stdout, command)

    def test_a_child_that_dies_ends_everything_with_its_last_words(self):
        self.start("--experts=1", "--prefill=0")
        self.wait_for("Ctrl-C stops everything")
        pids = children_of(self.child.pid)
        self.assertEqual(len(pids), 3)
        os.kill(pids[-1], signal.SIGKILL)
        self.assertEqual(self.child.wait(15), 1)
        self.assertRegex(self.text(), r"died: signal 9 \(Killed\). Its last words:\n  \| ")
        self.assert_nothing_left(pids)

    def test_goes_on_without_a_worker_that_another_can_stand_in_for(self):
        self.start("--experts=0", "--prefill=2", "--decode=2")
        self.wait_for("Ctrl-C stops everything")
        http = re.search(r"http://([\d.]+:\d+)/v1 ", self.text()).group(1)
        body = {"prompt": "word " * 100, "max_tokens": 4, "temperature": 0}
        before = post_json(http, "/v1/completions", body)
        self.assertEqual(before[0], 200, before)
        pids = {command_line(pid): pid for pid in children_of(self.child.pid)}
        for name in ("prefill-0", "decode-1"):
            os.kill(next(pid for line, pid in pids.items() if f"--name={name}" in line), signal.SIGKILL)
            self.wait_for(f"{name} died: signal 9 (Killed)")
        self.wait_for("the mesh goes on without it")
        for _ in range(4):
            after = post_json(http, "/v1/completions", body)
            self.assertEqual(after[0], 200, after)
            self.assertEqual(after[1]["choices"], before[1]["choices"])
        self.child.send_signal(signal.SIGINT)
        self.assertEqual(self.child.wait(15), 0)
        self.assert_nothing_left(pids.values())

    def test_children_do_not_outlive_a_killed_parent(self):
        self.start("--experts=0", "--prefill=0")
        self.wait_for("Ctrl-C stops everything")
        pids = children_of(self.child.pid)
        self.child.kill()
        self.child.wait(10)
        wait_until(lambda: not any(alive(p) for p in pids), 10, "all processes are gone")

    def test_the_end_of_the_terminal_stops_everything_unless_nohup(self):
        self.start("--experts=0", "--prefill=0")
        self.wait_for("Ctrl-C stops everything")
        pids = children_of(self.child.pid)
        for pid in pids:
            with open(f"/proc/{pid}/comm") as f:
                self.assertEqual(f.read(), "deltamesh\n")
        self.child.send_signal(signal.SIGHUP)
        self.assertEqual(self.child.wait(15), 0)
        self.assert_nothing_left(pids)

        ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)   # inherited, as nohup has it
        try:
            self.start("--experts=0", "--prefill=0")
        finally:
            signal.signal(signal.SIGHUP, ignored)
        self.wait_for("Ctrl-C stops everything")
        self.child.send_signal(signal.SIGHUP)
        with self.assertRaises(subprocess.TimeoutExpired):
            self.child.wait(1.5)
        pids = children_of(self.child.pid)
        self.child.send_signal(signal.SIGINT)
        self.assertEqual(self.child.wait(15), 0)
        self.assert_nothing_left(pids)

    def test_says_what_is_wrong_at_once(self):
        for flags, words in ((["--model=/nowhere"], "/nowhere"),
                             ([f"--model={MODEL}", "--decode=0"], "--decode")):
            done = subprocess.run([BINARY, "serve", *flags], capture_output=True, text=True, timeout=20,
                                  env={**os.environ, "TMPDIR": self.temp})
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(words, done.stderr)
        self.assertEqual(os.listdir(self.temp), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
