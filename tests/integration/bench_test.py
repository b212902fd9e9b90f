"""`deltamesh bench`: every row is there, with a ceiling that the same run measured."""
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
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


def tool(*args, limits=(), **options):
    """Any command under limits: (which, most)."""
    def limit():
        for which, most in limits:
            resource.setrlimit(which, (most, most))
    return subprocess.run([BINARY, *args], capture_output="stdout" not in options, timeout=60,
                          preexec_fn=limit, **options)


class BenchTest(unittest.TestCase):
    def check(self, row, unit):
        self.assertEqual(len(row["runs"]), 1, row)
        self.assertTrue(row["ceiling"], row)
        self.assertEqual(row["clean"], row["others_max"] <= 0.12, row)  # measured for every row
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

    def test_ceilings_alone(self):
        done = subprocess.run([BINARY, "bench", "--roofline", "--json", "--roofline-seconds=0.005"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        ceilings = json.loads(done.stdout)["ceilings"]
        self.assertEqual(len(ceilings), 6)
        self.assertTrue(all(math.isfinite(v) and v > 0 for v in ceilings.values()), ceilings)
        self.assertIn("with --roofline", bench("--roofline", "--roofline-seconds=0").stderr)

    def test_int8_activations_through_the_mesh(self):
        done = bench("--sections=prefill,mesh", "--json", "--activations=int8", *SHORT)
        self.assertEqual(done.returncode, 0, done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual(doc["activations"], "int8")
        for row in doc["results"]:
            self.check(row, "tps")
        self.assertEqual(doc["results"][0]["ceiling"], "8-bit product peak")
        with open("/proc/cpuinfo", encoding="utf-8") as cpu:
            vnni = doc["system"].startswith("AVX3") and "avx512_vnni" in cpu.read()
        if vnni:  # four products of bytes for one of floats
            self.assertGreater(doc["ceilings"]["int8_gops_best"], doc["ceilings"]["fp32_fma_gflops_best"])

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
        done = tool("bench", "--hybrid-vs-full", "--contexts=100", text=True)
        self.assertIn("contexts: 100; use multiples of 64", done.stderr)


class FaultsTest(unittest.TestCase):
    """What goes wrong is said, costs nothing that was measured, and leaves nothing behind."""

    def test_rows_before_a_failure_are_printed(self):
        done = bench("--sections=decode,context", "--json", *SHORT[:2], *SHORT[3:], "--depths=64000000000000")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("1 x 64000000000004 tokens: ", done.stderr)
        self.assertIn("use fewer tokens or sequences", done.stderr)
        doc = json.loads(done.stdout)
        self.assertEqual([r["test"] for r in doc["results"]], ["decode"])
        self.assertIn("64000000000004 tokens", doc["failed"])
        self.assertEqual(bench("--sections=context", *SHORT[3:5], "--depths=64000000000000").stdout, "")

    def test_more_streams_than_a_mesh_usually_runs(self):
        done = bench("--sections=mesh", "--json", "--mesh-experts=0", "--mesh-sequences=17", *SHORT[:3],
                     "--decode-steps=200", "--repetitions=1", "--roofline-seconds=0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["results"][-1]["seqs"], 17)

    def test_a_signal_leaves_nothing_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            endless = "--repetitions=100000"
            for number, args in ((signal.SIGTERM, ("--sections=mesh", f"--model={MODEL}", endless)),
                                 (signal.SIGINT, ("--hybrid-vs-full", "--contexts=1M", "--hybrid-steps=64"))):
                whole = subprocess.Popen([BINARY, "bench", *args], stderr=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder})
                try:
                    def files():
                        return [f for _, _, names in os.walk(folder) for f in names]
                    wait_until(files, 20, "something written")
                    started = children(whole.pid)
                    whole.send_signal(number)
                    self.assertEqual(whole.wait(30), -number)
                finally:
                    whole.kill()
                self.assertEqual(os.listdir(folder), [], args)
                self.assertFalse(any(parent(pid) for pid in started))

    def test_start_from_packed_weights(self):
        with tempfile.TemporaryDirectory() as folder:
            model, packed = os.path.join(folder, "model"), os.path.join(folder, "packed")
            subprocess.run(["/usr/bin/python3", os.path.join(GOLDEN, "../../../tools/make_checkpoint.py"),
                            "--family=kimi_linear", f"--out={model}", "--hidden=768", "--moe-inter=192",
                            "--dense-inter=1024"],
                           check=True, capture_output=True, timeout=60)
            flags = (f"--model={model}", "--sections=decode", "--json", *SHORT, f"--packed-dir={packed}")
            docs = []
            for _ in range(2):
                done = subprocess.run([BINARY, "bench", *flags], capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stderr)
                docs.append(json.loads(done.stdout))
            self.assertTrue(docs[0]["start_packed_now"])
            self.assertFalse(docs[1]["start_packed_now"])
            self.assertGreater(docs[1]["model_bytes"], 90 << 20)
            # What the program takes without a model is below 48 MiB.
            self.assertLess(docs[1]["start_resident_bytes"], 1.05 * docs[1]["model_bytes"] + (48 << 20))

    def test_output_that_does_not_arrive(self):
        with open("/dev/full", "wb") as full:
            for args in (("bench", f"--model={MODEL}", "--sections=decode", "--json", *SHORT),
                         ("bench", "--curve=128", "--json"), ("inspect", MODEL), ("--help",)):
                done = tool(*args, stdout=full, stderr=subprocess.PIPE)
                self.assertEqual(done.returncode, 1, args)
                self.assertIn(b"standard output: cannot be written", done.stderr)

    def test_odd_input_is_no_crash(self):
        done = subprocess.run([BINARY, "bench", f"--model={MODEL}", "--sections=decode", "--json",
                               b"--label=a\xff", *SHORT], capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["label"], "a\ufffd")
        with tempfile.TemporaryDirectory(suffix=os.fsdecode(b"\xff")) as folder:
            model = os.path.join(folder, os.fsdecode(b"m\xff"))
            shutil.copytree(MODEL, model)
            done = tool("bench", f"--model={model}", "--sections=mesh", "--mesh-experts=0", "--json", *SHORT)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(json.loads(done.stdout)["model"].endswith("/m\ufffd"))
        done = bench("--sections=mesh", *SHORT, TMPDIR="/nosuch")
        self.assertEqual(done.returncode, 1)
        self.assertIn("set TMPDIR to a folder that can be written", done.stderr)
        for args in (("pack", MODEL), ("generate", f"--model={MODEL}", "--prompt=a")):
            for count in ("70000", "-5"):
                done = tool(*args, f"--threads={count}", text=True)
                self.assertIn("--threads: Value " + count, done.stderr + done.stdout)
        with tempfile.TemporaryDirectory() as folder:
            done = tool("logits", f"--model={MODEL}", "--tokens=1", f"--out={folder}/o.npy", "--threads=1000",
                        limits=[(resource.RLIMIT_AS, 3 << 30)], text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("use fewer --threads", done.stderr)
            done = tool("pack", MODEL, f"--packed-dir={folder}", text=True,
                        limits=[(resource.RLIMIT_FSIZE, 100000)])
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("ulimit -f", done.stderr)
            self.assertFalse([f for f in os.listdir(folder) if f.endswith(".partial")])
            done = tool("pack", MODEL, "--packed-dir", "", text=True)
            self.assertIn('packed-dir: "" leaves nowhere to pack to', done.stderr)

    def test_lesser_cpus_give_the_same_logits(self):
        text = bench("--sections=decode", "--cpu-target=sse4").stderr
        targets = text.strip().rpartition("; use ")[2].split(" or ")
        tokens = ",".join(str(i * 37 % 200) for i in range(70))
        with tempfile.TemporaryDirectory() as folder:
            for model in ("kimi_k3_tiny", "kimi_linear_tiny"):
                for more in ((), ("--weights=8bit", "--activations=int8")):
                    logits = set()
                    for target in targets:
                        out = os.path.join(folder, "o.npy")
                        done = tool("logits", f"--model={os.path.join(GOLDEN, model)}", f"--tokens={tokens}",
                                    f"--out={out}", f"--cpu-target={target}", *more, text=True)
                        self.assertEqual(done.returncode, 0, done.stderr)
                        with open(out, "rb") as f:
                            logits.add(f.read())
                    self.assertEqual(len(logits), 1, (model, more, targets))

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

    def test_what_cannot_be_measured(self):
        for flags, message in (
                (("--curve=128", f"--quality={__file__}"), "--quality excludes --curve"),
                (("--curve=128", "--hybrid-vs-full"), "excludes"),
                (("--hybrid-vs-full",), "--model: --hybrid-vs-full makes its own models"),
                (("--fill",), "--fill requires --curve"),
                (("--contexts=64",), "--contexts requires --hybrid-vs-full"),
                (("--quality=nosuch",), "quality: nosuch is not a file; name a text to read"),
                (("--mesh-experts=13",), "mesh-experts: 13 shards of 12 experts"),
                (("--prefill=1,,2",), "1,,2: use numbers such as 1,4,8")):
            done = bench(*flags)
            self.assertNotEqual(done.returncode, 0, flags)
            self.assertIn(message, done.stderr + done.stdout)
        done = tool("bench", f"--quality={__file__}", text=True)
        self.assertIn("model: none given; use --model FOLDER", done.stderr)
        for flag, message in (("--depths=100", "depths: 100; use multiples of 64"),
                              ("--handoff-mib=0", "handoff-mib: 0; use 1 to"),
                              ("--sections=speed", "--sections"),
                              ("--prefill=0", "prefill: 0 tokens; use at least 1")):
            done = bench("--sections=handoff", "--roofline-seconds=0", *SHORT[3:5], flag)
            self.assertNotEqual(done.returncode, 0, flag)
            self.assertIn(message, done.stderr + done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
