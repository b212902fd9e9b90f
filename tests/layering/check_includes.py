#!/usr/bin/env python3
"""Checks that includes only point down the layers.

A folder may include itself and what its row lists; a listed folder stands for its subfolders too.
Generated protocol headers count as `proto`; those with services in them as `proto-grpc`.
"""
import os
import re
import sys

KERNELS = ["kernels/base", "kernels/gemm", "kernels/norm", "kernels/conv", "kernels/kda", "kernels/mla",
           "kernels/moe", "kernels/residual", "kernels/probe"]

MAY = {
    "proto": [],
    "kernels/base": [],
    **{k: ["kernels/base"] for k in KERNELS[1:]},
    "runtime/base": [],
    "runtime/text": ["runtime/base"],
    "runtime/prefix": ["runtime/base"],
    "runtime/cache": ["runtime/base", "runtime/prefix", "kernels/base"],
    "runtime/store": ["runtime/base", "runtime/cache", "runtime/prefix"],
    "runtime/scheduler": ["runtime/base"],
    "runtime/sampling": ["runtime/base", "kernels/base"],
    "runtime/transfer": ["runtime/base", "runtime/cache", "proto"],
    "runtime/expert": ["runtime/base", "runtime/transfer", "kernels", "proto"],
    "runtime/model": ["runtime/base", "runtime/cache", "runtime/expert", "kernels"],
    "runtime/engine": ["runtime/base", "runtime/cache", "runtime/expert", "runtime/model",
                       "runtime/sampling", "runtime/scheduler"],
    "services/common": ["runtime/base", "proto", "proto-grpc"],
    # The router links no kernel and no engine: it decides, it does not compute.
    "services/router": ["services/common", "runtime/base", "runtime/text", "runtime/prefix", "proto",
                        "proto-grpc"],
    "services/worker": ["services/common", "runtime", "proto", "proto-grpc"],
    "services/prefill": ["services/common", "services/worker", "runtime", "proto", "proto-grpc"],
    "services/decode": ["services/common", "services/worker", "runtime", "proto", "proto-grpc"],
    "services/expert": ["services/common", "services/worker", "runtime", "proto", "proto-grpc"],
    "services/plan": ["services/common", "runtime"],
    # The roles' own decisions, put together with virtual workers and time.
    "services/simulate": ["services/common", "services/plan", "services/router", "services/worker", "runtime",
                          "proto"],
    # The command line composes roles; nothing includes it.
    "services/cli": ["services", "runtime", "kernels", "proto", "proto-grpc"],
}

# Single headers that a folder may include beyond its row, each with the reason.
EXCEPTIONS = {
}

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)

PROTOCOLS = ("deltamesh", "health", "otlp")  # folders of generated headers
OURS = ("kernels", "runtime", "services", "tests", *PROTOCOLS)


def folder_of(path):
    parts = path.split("/")
    if parts[0] in PROTOCOLS:
        return "proto-grpc" if path.endswith(".grpc.pb.h") else "proto"
    return "/".join(parts[:2])


def allowed(source, target, header, path):
    if target == source:
        return True
    if (source, header) in EXCEPTIONS:
        return True
    # Only files that say so in their name may see gRPC outside services.
    return any(target == m or target.startswith(m + "/") for m in MAY[source])


def check_file(path, text):
    source = folder_of(path)
    if source not in MAY:
        return [f"{path}: folder {source} is not in the table of {os.path.basename(__file__)}"]
    bad = []
    for header in INCLUDE.findall(text):
        if header.split("/")[0] not in OURS:
            continue
        target = folder_of(header)
        if not allowed(source, target, header, path):
            bad.append(f"{path}: includes {header}; {source} may include {', '.join(MAY[source]) or 'nothing'}")
    return bad


def cycles():
    """The table itself must be free of cycles (folders listed as a whole are expanded)."""
    def expand(m):
        return [f for f in MAY if f == m or f.startswith(m + "/")]
    edges = {f: {t for m in MAY[f] for t in expand(m) if t != f} for f in MAY}
    state = {}

    def visit(f, trail):
        if state.get(f) == 2:
            return []
        if state.get(f) == 1:
            return [" -> ".join(trail + [f])]
        state[f] = 1
        found = [c for t in edges[f] for c in visit(t, trail + [f])]
        state[f] = 2
        return found
    return [c for f in MAY for c in visit(f, [])]


def check_tree(root):
    bad = ["the table has a cycle: " + c for c in cycles()]
    for top in ("kernels", "runtime", "services"):
        for folder, _, files in os.walk(os.path.join(root, top)):
            for name in files:
                if name.endswith((".h", ".cc", ".cu")):
                    full = os.path.join(folder, name)
                    with open(full, encoding="utf-8") as f:
                        bad += check_file(os.path.relpath(full, root), f.read())
    return bad


def self_test():
    assert check_file("runtime/cache/x.h", '#include "runtime/model/model.h"\n')
    assert check_file("services/router/x.cc", '#include "runtime/engine/engine.h"\n')
    assert check_file("services/router/x.cc", '#include "services/decode/decode_core.h"\n')
    assert check_file("runtime/transfer/x.cc", '#include "deltamesh/mesh/mesh.grpc.pb.h"\n')
    assert check_file("runtime/new_folder/x.h", "")
    assert not check_file("runtime/engine/x.cc", '#include "runtime/model/model.h"\n#include <vector>\n')
    print("the check finds what it should")


if __name__ == "__main__":
    if sys.argv[1] == "--self-test":
        self_test()
        sys.exit(0)
    problems = check_tree(sys.argv[1])
    print("\n".join(problems) or "includes point down")
    sys.exit(1 if problems else 0)
