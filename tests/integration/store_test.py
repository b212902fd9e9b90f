"""States that outlive their processes: from a folder and from an S3 server, or recomputed when damaged."""
import glob
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = os.environ["DELTAMESH_PYTHON_PATH"].split(":")
from plain import plain_answers  # noqa: E402
from processes import BINARY, GOLDEN, Mesh, wait_until  # noqa: E402

MODEL = os.path.join(GOLDEN, "kimi_linear_tiny")
FLAGS = ["--slabs=4", "--latent-blocks=64", "--context-tokens=1024", "--store-after-seconds=0.2",
         "--store-gib=0.05"]
CASE = dict(tokens=[random.Random(5).randrange(512) for _ in range(300)], max_tokens=8, logprobs=1)
CACHED = 256   # of its tokens


class StoreTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="deltamesh-store-")
        cls.plain = plain_answers(MODEL, [CASE])[0]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def mesh(self, *store):
        mesh = Mesh(MODEL, 1, 1, 1, [*FLAGS, *store], cache_mib=64)
        self.addCleanup(mesh.close)
        return mesh

    def ask(self, mesh):
        """The tokens that were not computed."""
        answer = mesh.generate(**CASE)
        self.assertEqual(answer.tokens, self.plain["tokens"])
        self.assertEqual(answer.logprobs, self.plain["logprobs"])
        return answer.finish.usage.cached_tokens

    def count(self, mesh, name, **labels):
        return sum(mesh[worker].metrics().sum(name, **labels) for worker in ("prefill-0", "decode-0"))

    def wait_counted(self, mesh, least, name, **labels):
        wait_until(lambda: self.count(mesh, name, **labels) >= least, 20, f"{name} {labels} reaches {least}")

    def restart(self, mesh):
        for worker in ("prefill-0", "decode-0"):
            mesh[worker].stop()
            mesh[worker].restart()
        mesh.wait_ready()

    def test_a_folder_outlives_the_workers(self):
        folder = os.path.join(self.folder, "states")
        mesh = self.mesh(f"--store-dir={folder}")
        self.assertEqual(self.ask(mesh), 0)
        self.wait_counted(mesh, 1, "deltamesh_store_operations_total", tier="disk", operation="write")
        self.restart(mesh)
        self.wait_counted(mesh, 1, "deltamesh_store_states", tier="disk")
        self.assertEqual(self.ask(mesh), CACHED)
        self.wait_counted(mesh, 1, "deltamesh_store_loads_total", result="hit")

        mesh["prefill-0"].stop()
        mesh["decode-0"].stop()
        states = glob.glob(os.path.join(folder, "*.state"))
        self.assertTrue(states)
        for path in states:
            with open(path, "r+b") as f:
                f.seek(-1, os.SEEK_END)
                last = f.read(1)[0]
                f.seek(-1, os.SEEK_END)
                f.write(bytes([last ^ 1]))
        self.restart(mesh)
        self.wait_counted(mesh, 1, "deltamesh_store_states", tier="disk")
        self.assertEqual(self.ask(mesh), 0)
        self.wait_counted(mesh, 1, "deltamesh_store_refused_total", tier="disk", reason="bad_content")

    def test_a_bucket_is_every_machines(self):
        # moto's; and that of a program, where there is one (tests/unit/store/s3_server.py).
        for program in filter(None, ["moto", os.environ.get("DELTAMESH_TEST_S3_SERVER")]):
            with self.subTest(server=program):
                self.check_a_bucket([] if program == "moto" else [program])

    def check_a_bucket(self, program):
        for name in "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY":  # of who runs the tests
            os.environ.pop(name, None)
        python = os.path.join(os.environ["DELTAMESH_VENV"], "bin", "python")
        self.assertTrue(os.path.exists(python), "no S3 server: run `./dev test` once, which installs it")
        out = os.path.join(self.folder, "program" if program else "s3")
        server = subprocess.Popen([python, "-B", os.environ["DELTAMESH_S3_SERVER"], out, *program],
                                  stdin=subprocess.PIPE)
        self.addCleanup(server.stdin.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        wait_until(lambda: os.path.exists(out), 60, "the S3 server is up")
        with open(out) as f:
            said = dict(line.strip().split("=", 1) for line in f)
        os.environ["AWS_ACCESS_KEY_ID"] = said["access_key"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = said["secret_key"]
        bucket = f"--store-s3={said['address']}/{said['bucket']}/mesh"
        one = self.mesh(bucket)
        self.assertEqual(self.ask(one), 0)
        self.wait_counted(one, 1, "deltamesh_store_operations_total", tier="object_store", operation="write")
        one.close()
        other = self.mesh(bucket)
        self.wait_counted(other, 2, "deltamesh_store_states", tier="object_store")
        # Neither worker holds anything, and the router knows what they would read.
        wait_until(lambda: other.router.metrics().sum("deltamesh_prefix_index_objects") >= 1, 20,
                   "the router knows")
        self.assertEqual(self.ask(other), CACHED)
        explained = subprocess.run([BINARY, "explain", f"--router={other.router.ports()['grpc']}"],
                                   check=True, capture_output=True, text=True, timeout=30).stdout
        self.assertIn(f"no latents, no snapshot, in the object store at {CACHED}", explained)
        self.assertIn("of it read from the object store", explained)
        # A server that goes away costs nothing but what it holds.
        server.kill()
        third = self.mesh(bucket)
        self.assertEqual(self.ask(third), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
