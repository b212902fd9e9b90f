#!/usr/bin/env python3
"""Style as a test: line and file length, stray words, machine paths, large files, unlisted sources."""
import os
import re
import subprocess
import sys

LINE_MAX = 110
FILE_LINES_MAX = 700
BLOB_BYTES_MAX = 4 << 20
CODE = (".h", ".cc", ".cu", ".py", ".proto", ".sh", ".txt", ".md")
# Data that tests read, and the oracle, are taken as they are.
AS_IS = ("tests/data/",)
WORDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|home|root|farm)/")
DISABLED = re.compile(r"\b(DISABLED_|GTEST_SKIP)")


def check_text(path, text):
    bad = []
    lines = text.split("\n")
    if path.endswith((".h", ".cc", ".cu", ".py")) and len(lines) > FILE_LINES_MAX:
        bad.append(f"{path}: {len(lines)} lines; split it: a file is one idea (at most {FILE_LINES_MAX})")
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if path.endswith((".h", ".cc", ".cu", ".py", ".proto")) and len(line) > LINE_MAX:
            bad.append(f"{where}: {len(line)} characters; at most {LINE_MAX}")
        if WORDS.search(line):
            bad.append(f"{where}: a stray '{WORDS.search(line).group(0)}'; finish it or file it")
        if MACHINE_PATH.search(line):
            bad.append(f"{where}: a path of one machine")
        if DISABLED.search(line) and "reason:" not in text:
            bad.append(f"{where}: a test that does not run needs a 'reason:' in its file")
    # A SIMD body is included once per target, so it must not guard itself.
    if path.endswith(".h") and not path.endswith("-inl.h") and "#pragma once" not in text:
        bad.append(f"{path}: no #pragma once")
    return bad


def tracked(root):
    out = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], check=True,
                         capture_output=True, text=True).stdout
    return [p for p in out.split("\n") if p and os.path.isfile(os.path.join(root, p))]


def names(makefile, source):
    """Whether the text names the source, whole or as NAME of a loop over NAME_test.cc."""
    def word(w):
        return re.search(r"(^|[\s/(])" + re.escape(w) + r"($|[\s)])", makefile) is not None
    return word(source) or (source.endswith("_test.cc") and "}_test.cc" in makefile and
                            word(source[:-len("_test.cc")]))


def unlisted_sources(root, paths):
    """Every source is named in a CMakeLists.txt of its folder or one above."""
    bad = []
    for path in paths:
        if not path.endswith((".cc", ".cu")) or path.startswith(AS_IS):
            continue
        folder, name, listed = os.path.dirname(path), os.path.basename(path), False
        while folder and not listed:
            makefile = os.path.join(root, folder, "CMakeLists.txt")
            if os.path.exists(makefile):
                with open(makefile, encoding="utf-8") as f:
                    listed = names(f.read(), name)
            folder = os.path.dirname(folder)
        if not listed:
            bad.append(f"{path}: not named in any CMakeLists.txt above it")
    return bad


def tests_nobody_runs(paths, read):
    """Folders of tests that no list adds, and Python test classes that no ctest names."""
    bad = []
    folders = {os.path.dirname(p) for p in paths if p.startswith("tests/") and p.endswith("/CMakeLists.txt")}
    added = read("tests/CMakeLists.txt")
    for folder in sorted(folders - {"tests"}):
        if not re.search(rf"(?<![\w/]){folder[len('tests/'):]}(?![\w/])", added):
            bad.append(f"{folder}: not added by tests/CMakeLists.txt, so its tests do not run")
    for path in paths:
        if not (path.startswith("tests/") and path.endswith("_test.py")):
            continue
        listed = read(os.path.dirname(path) + "/CMakeLists.txt")
        for name in re.findall(r"(?m)^class (\w+Test)\(", read(path)):
            if not re.search(rf"\b{name}\b", listed) and not whole_file(path, listed):
                bad.append(f"{path}: no ctest runs {name}")
    return bad


def whole_file(path, listed):
    """Whether some test runs the file without naming a class."""
    return re.search(re.escape(os.path.basename(path)) + r"\s*[)\n]", listed) is not None


def check_tree(root):
    def read(path):
        with open(os.path.join(root, path), encoding="utf-8") as f:
            return f.read()
    bad, paths = [], tracked(root)
    for path in paths:
        full = os.path.join(root, path)
        if os.path.getsize(full) > BLOB_BYTES_MAX:
            bad.append(f"{path}: {os.path.getsize(full)} bytes; at most {BLOB_BYTES_MAX}")
        if path.startswith(AS_IS) or path.startswith("tests/layering/"):
            continue
        if path.endswith(CODE) or path in ("dev", ".ci/run"):
            with open(full, encoding="utf-8") as f:
                bad += check_text(path, f.read())
    return bad + unlisted_sources(root, paths) + tests_nobody_runs(paths, read)


def self_test():
    marker = "TO" + "DO"
    assert check_text("a/b.cc", f"int x;  // {marker} later\n")
    assert check_text("a/b.cc", "x" * 200)
    assert check_text("a/b.cc", "\n" * 800)
    assert check_text("a/b.h", "int x;\n")
    assert check_text("a/b.py", 'p = "/ho' + 'me/me/x"\n')
    assert check_text("a/b_test.cc", "TEST(A, DISA" + "BLED_B) {}\n")
    assert not check_text("a/b.h", "#pragma once\nint x;\n")
    texts = {"tests/CMakeLists.txt": "foreach(part unit/a)", "tests/unit/a/CMakeLists.txt": "",
             "tests/unit/b/CMakeLists.txt": "py(x_test.py OneTest)",
             "tests/unit/b/x_test.py": "class OneTest(T):\nclass TwoTest(T):\n"}
    assert len(tests_nobody_runs(list(texts), texts.get)) == 2
    print("the check finds what it should")


if __name__ == "__main__":
    if sys.argv[1] == "--self-test":
        self_test()
        sys.exit(0)
    problems = check_tree(sys.argv[1])
    print("\n".join(problems) or "the tree is tidy")
    sys.exit(1 if problems else 0)
