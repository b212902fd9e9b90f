#!/usr/bin/env python3
"""Runs `deltamesh bench` for several models and writes a dated results file: Markdown for people and the
JSON of every run beside it.

  record.py --out FILE.md --run "LABEL: FLAGS OF BENCH" ... [--beside "LABEL: FLAGS => COMMAND"] ...

With --beside another engine's benchmark takes turns with ours: COMMAND prints JSON with "results" (rows of
test, n, depth, seqs, median_tps); rows with equal keys stand side by side, with the median of all ratios.

A command that fails ends the measuring: what was measured before is written, and the exit code is 1.
"""
import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time

OTHERS_MAX = 0.12  # cores; a run beside more is not clean
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()


def machine():
    cpu, memory = {}, ""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        for line in f:
            key, _, value = line.partition(":")
            cpu.setdefault(key.strip(), value.strip())
    with open("/proc/meminfo", encoding="utf-8") as f:
        memory = f"{int(f.readline().split()[1]) / 2**20:.1f} GiB"
    wanted = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")
    flags = (cpu.get("flags") or cpu.get("Features", "")).split()
    return {"cpu": cpu.get("model name", platform.machine()), "cores": len(os.sched_getaffinity(0)),
            "features": [w for w in wanted if w in flags], "memory": memory,
            "kernel": platform.release(), "commit": output("git", "rev-parse", "HEAD"),
            "changed_files": len(output("git", "status", "--porcelain", "--untracked-files=no").splitlines())}


class Failed(Exception):
    """A measurement that came to nothing."""


def shown(command):
    """A command for the file, without the folders of this machine."""
    return shlex.join(os.path.basename(word) if word.startswith("/") else
                      "=".join(os.path.basename(part) for part in word.split("=")) if "=/" in word else word
                      for word in command)


def run(command, seconds, keys=("results",)):
    """The JSON a command prints, with at least `keys`; what it prints beside goes to standard error."""
    begin = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Failed(f"{shown(command)}: {getattr(e, 'strerror', None) or 'took too long'}") from e
    print(f"  {time.monotonic() - begin:.0f} s: {shlex.join(command)}", file=sys.stderr)
    if done.returncode != 0:
        raise Failed(f"exit code {done.returncode} of {shown(command)}")
    try:
        doc = json.loads(done.stdout)
    except ValueError as e:
        raise Failed(f"{shown(command)}: its output is no JSON ({e})") from e
    missing = [k for k in keys if k not in doc]
    if missing:
        raise Failed(f"{shown(command)}: no {', '.join(missing)} in its output; only speed can be recorded "
                     "(no --curve, --hybrid-vs-full or --quality)")
    return doc


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def result_rows(doc):
    for r in doc["results"] + doc["handoff"]:
        unit = "gbs" if r["test"] == "handoff" else "tps"
        size = f"{r['n'] >> 20} MiB" if r["test"] == "handoff" else r["n"]
        fraction = f"{100 * r['fraction_of_ceiling']:.0f} % of {r['ceiling']}" if "ceiling" in r else ""
        others = "not known" if r.get("clean") is None else \
            "" if r["clean"] else f"{r['others_max']:.1f} cores"
        yield [r["test"], size, r["depth"], r["seqs"],
               number(r["median_" + unit]) + (" GB/s" if unit == "gbs" else " tok/s"),
               f"{number(min(r['runs']))} .. {number(max(r['runs']))}", fraction, others]


def key(row):
    return row["test"], row["n"], row["depth"], row["seqs"]


def beside(ours, theirs, rounds, seconds):
    """Turns of both; {key: ([ours], [theirs], [others' load of each run, None where not known])}"""
    pairs = {}
    for _ in range(rounds):
        mine = {key(r): r for r in run(ours, seconds)["results"]}
        other = {key(r): r for r in run(theirs, seconds)["results"]}
        for k in (k for k in mine if k in other):
            left, right, others = pairs.setdefault(k, ([], [], []))
            left.append(mine[k]["median_tps"])
            right.append(other[k]["median_tps"])
            others += [mine[k].get("others_max"), other[k].get("others_max")]
    if not pairs:
        raise Failed("no row of both engines has the same test, n, depth and seqs")
    return pairs


def can_write(path):
    """Asks before anything is measured."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        for name in (path, os.path.splitext(path)[0] + ".json"):
            new = not os.path.exists(name)
            with open(name, "a", encoding="utf-8"):
                pass
            if new:
                os.remove(name)
    except OSError as e:
        raise SystemExit(f"record: --out: {e}") from e


def measure_run(spec, a, record, commands, parts):
    label, _, flags = spec.partition(":")
    command = [a.binary, "bench", "--json", "--label", label.strip(), *shlex.split(flags)]
    doc = run(command, a.seconds, ("results", "handoff", "model", "model_bytes"))
    doc["model"], doc["packed"] = os.path.basename(doc["model"]), os.path.basename(doc["packed"])
    record["runs"].append(doc)
    commands.append(shown(command))
    parts.append(f"## {label.strip()}\n\n{doc['weights']} weights, {doc['model_bytes'] >> 20} MiB, "
                 f"{doc['threads']} threads, {doc['system']}\n\n" +
                 table(("test", "size", "context", "sequences", "median", "range", "of the ceiling",
                        "others used"), result_rows(doc)))


def measure_beside(spec, a, record, commands, parts):
    label, _, rest = spec.partition(":")
    flags, _, theirs = rest.partition("=>")
    ours = [a.binary, "bench", "--json", "--label", label.strip(), *shlex.split(flags)]
    pairs = beside(ours, shlex.split(theirs), a.rounds, a.seconds)
    commands += [shown(ours), shown(shlex.split(theirs))]
    rows = []
    for (test, n, depth, seqs), (left, right, others) in pairs.items():
        ratio = statistics.median(x / y for x, y in zip(left, right))
        known = [x for x in others if x is not None]
        record["beside"].append({"label": label.strip(), "test": test, "n": n, "depth": depth,
                                 "seqs": seqs, "ours": left, "theirs": right, "ratio": ratio,
                                 "others": others,
                                 "clean": max(known) <= OTHERS_MAX if len(known) == len(others) else None})
        most = max(known, default=None)
        rows.append([test, n, depth, seqs, number(statistics.median(left)),
                     number(statistics.median(right)), f"{ratio:.2f}x",
                     f"{most:.1f} cores" if most is not None and most > OTHERS_MAX else
                     "" if len(known) == len(others) else "not known"])
    parts.append(f"## {label.strip()}\n\n{a.rounds} turns of each, tokens per second\n\n" +
                 table(("test", "size", "context", "sequences", "ours", "theirs", "ratio",
                        "others used"), rows))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, help="Markdown file to write; the JSON stands beside it")
    ap.add_argument("--binary", default=os.path.join(ROOT, "build", "bin", "deltamesh"))
    ap.add_argument("--run", action="append", default=[], metavar="LABEL: FLAGS")
    ap.add_argument("--beside", action="append", default=[], metavar="LABEL: FLAGS => COMMAND")
    ap.add_argument("--rounds", type=int, default=3, help="turns of each engine beside another")
    ap.add_argument("--seconds", type=float, default=600, help="longest one command may take")
    a = ap.parse_args()
    if not a.run and not a.beside:
        ap.error("nothing to measure; give --run or --beside")
    for spec in a.run + a.beside:
        label, colon, rest = spec.partition(":")
        if not label.strip() or not colon or (spec in a.beside and "=>" not in rest):
            ap.error(f"{spec!r}: use {'LABEL: FLAGS => COMMAND' if spec in a.beside else 'LABEL: FLAGS'}")
    can_write(a.out)
    record = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
              "machine": machine(), "load_before": os.getloadavg(), "runs": [], "beside": []}
    commands, parts = [], []
    failure = None
    try:
        for measure, specs in ((measure_run, a.run), (measure_beside, a.beside)):
            for spec in specs:
                measure(spec, a, record, commands, parts)
    except Failed as e:
        failure = f"record: {e}"
        if not parts:
            raise SystemExit(failure) from e
        record["failed"] = str(e)
        parts.append(f"What was asked for beyond it failed: {e}\n")

    record["load_after"] = os.getloadavg()
    m = record["machine"]
    changed = f" with {m['changed_files']} changed files" if m["changed_files"] else ""
    head = [f"# {record['date'][:10]}\n",
            f"{m['cpu']}, {m['cores']} cores ({', '.join(m['features'])}), {m['memory']}, "
            f"Linux {m['kernel']}.",
            f"Commit {m['commit']}{changed}.",
            "Load average (1, 5, 15 min) "
            f"{', '.join(f'{x:.2f}' for x in record['load_before'])} before and "
            f"{', '.join(f'{x:.2f}' for x in record['load_after'])} after; {record['date']}.\n"]
    for doc in record["runs"]:
        if "start_seconds" in doc:
            head.append(f"* {doc['label']} was ready in {doc['start_seconds']:.2f} s"
                        f"{', packing included' if doc['start_packed_now'] else ''}, "
                        f"{doc['start_resident_bytes'] / 2**20:.0f} MiB resident, "
                        f"{doc['start_resident_bytes'] / doc['model_bytes']:.2f} of its weights")
        if "ceilings" in doc:
            c = doc["ceilings"]
            head.append(f"* ceilings before {doc['label']}: reads {c['read_gbs_median']:.1f} GB/s median, "
                        f"{c['read_gbs_best']:.1f} best; multiply-add "
                        f"{c['fp32_fma_gflops_median']:.0f} GFLOP/s median, "
                        f"{c['fp32_fma_gflops_best']:.0f} best")
    text = "\n".join(head) + "\n\n" + "\n".join(parts) + "\n## Commands\n\n```sh\n" + \
        "\n".join(commands) + "\n```\n"
    with open(a.out, "w", encoding="utf-8") as f:
        f.write(text)
    with open(os.path.splitext(a.out)[0] + ".json", "w", encoding="utf-8") as f:
        json.dump(record, f, indent=1)
        f.write("\n")
    print(text)
    if failure is not None:
        raise SystemExit(failure)


if __name__ == "__main__":
    main()
