"""Every command that README.md shows is run here, against a mesh on free ports and the shipped model."""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from processes import BINARY, Mesh  # noqa: E402

ROOT = os.environ["DELTAMESH_SOURCE_DIR"]
MODEL = os.path.join(ROOT, "models", "reader")


def commands():
    """Commands of the README's shell blocks, without comments; continued lines are joined."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        blocks = re.findall(r"```sh\n(.*?)```", f.read(), re.S)
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").split("\n"):
        line = re.sub(r"\s+#.*$", "", line).strip()
        if line:
            found.append(line)
    return found


class ReadmeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mesh = Mesh(MODEL)
        cls.folder = tempfile.mkdtemp(prefix="deltamesh-readme-")

    @classmethod
    def tearDownClass(cls):
        cls.mesh.close()
        subprocess.run(["rm", "-rf", cls.folder], check=True)

    def run_command(self, command, **more):
        ports = self.mesh.router.ports()
        command = command.replace("127.0.0.1:8080", ports["http"]).replace("127.0.0.1:8081", ports["grpc"])
        command = command.replace("build/bin/deltamesh", BINARY)
        command = re.sub(r"\bDIR\b", MODEL, command)
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True,
                              timeout=60, **more)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_every_command(self):
        seen = answered = 0
        for command in commands():
            with self.subTest(command=command):
                seen += 1
                if command.startswith("./dev "):
                    self.known_to_dev(command.split()[1])
                elif " serve " in command:
                    self.help_knows_the_flags(command)
                elif " chat " in command:
                    self.assertTrue(self.run_command(command, input="Hello\n"))
                elif "Who owns the red boat?" in command:
                    said = self.run_command(command)
                    if " call " in command:  # an event a line
                        events = map(json.loads, said.splitlines())
                        said = "".join(e.get("delta", {}).get("text", "") for e in events)
                    self.assertIn("The red boat belongs to Olof.", said)
                    answered += 1
                else:
                    self.run_command(command, stdin=subprocess.DEVNULL)
        self.assertGreaterEqual(seen, 8)
        self.assertEqual(answered, 2)  # over HTTP and over gRPC

    def known_to_dev(self, name):
        """`./dev test` is what runs this very test; that it and `serve` exist is what can be checked here."""
        text = subprocess.run(["bash", os.path.join(ROOT, "dev"), "help"], capture_output=True, text=True,
                              check=True).stdout
        self.assertRegex(text, rf"(?m)^\./dev {name}\b")
        subprocess.run(["bash", "-n", os.path.join(ROOT, "dev")], check=True)

    def help_knows_the_flags(self, command):
        """serve itself is tested in serve_test.py."""
        text = self.run_command("build/bin/deltamesh serve --help")
        for flag in re.findall(r"--[a-z-]+", command):
            self.assertIn(flag, text)

    def test_first_answer_of_dev_serve(self):
        with open(os.path.join(ROOT, "dev"), encoding="utf-8") as f:
            question = re.search(r"FIRST_QUESTION='(.*?)'", f.read(), re.S)[1]
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            promised = re.search(r'one answer, "(.*?)"', f.read())[1]
        done = subprocess.run([BINARY, "generate", f"--model={MODEL}", "--temperature=0", "--chat", question],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(promised, done.stdout)

    def test_length_and_links(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            text = f.read()
        self.assertLessEqual(text.count("\n"), 130)
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                self.assertTrue(os.path.exists(os.path.join(ROOT, target)), target)


if __name__ == "__main__":
    unittest.main(verbosity=2)
