"""Writes random chat requests and the segments the oracle renders for them, as JSON.

Usage: chat_oracle.py REFERENCE.py COUNT OUT.json. Half of the cases are K3's, half Kimi-Linear's.
"""
import importlib.util
import json
import random
import sys

spec = importlib.util.spec_from_file_location("reference", sys.argv[1])
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)
rng = random.Random(77)

WORDS = ["Rome", "a & b", 'say "hi"', "中文", "<|open|>", "<|im_end|>", "line\nbreak", "\ttab", "é", "👍", "\\",
         "\x01", "\x7f", " ", "\u00a0", "&quot;", "100%", "%s", "{}", ""]
NUMBERS = [0, 1, -7, 2**31, 2**63 - 1, 2**64 - 1, -2**63, 0.5, -2.5, 1e16, 1e15, 1.5e300, 1e-5, 1e-4, 0.1,
           1 / 3, -0.0, 123456789.125, 5e-324, 1e22, 9007199254740993.0, 100.0]


def text():
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(0, 4)))


def value(depth):
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice([True, False, None])
    if kind < 5:
        return text()
    if kind == 5:
        return [value(depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(WORDS) + str(rng.randrange(5)): value(depth - 1) for _ in range(rng.randrange(4))}


def obj():
    return {rng.choice(WORDS) + str(rng.randrange(9)): value(2) for _ in range(rng.randrange(5))}


def tools():
    return [{"type": "function", "function": {"name": text() or "f", "parameters": obj()}, **obj()}
            for _ in range(rng.randrange(1, 3))]


def arguments():
    a = rng.choice([obj(), obj(), json.dumps(obj(), ensure_ascii=False), json.dumps(obj(), indent=1), "",
                    "  \n", "{broken", "null", "[]", "\u00a0", "\ufeff{}", '{"a": 1, "a": 2, "b": NaN'])
    return a


def calls(k3):
    out = []
    for n in range(rng.randrange(1, 4)):
        f = {"name": rng.choice(["f", "get_weather", 'q"&'])}
        f["arguments"] = arguments()
        if k3 and rng.random() < 0.1:
            del f["arguments"]
        call = {"id": "functions.%s:%d" % (f["name"], n), "type": "function", "function": f}
        out.append({"id": call["id"], **f} if k3 and rng.random() < 0.1 else call)
    return out


def conversation(k3):
    out, last = [], None
    for _ in range(rng.randrange(1, 5)):
        role = rng.choice(["system", "user", "user", "assistant"])
        m = {"role": role, "content": rng.choice([text(), text(), None])}
        if rng.random() < 0.2:
            m["name"] = text()
        if k3 and role == "system" and rng.random() < 0.3:
            m["tools"] = tools()
        if role == "assistant":
            if rng.random() < 0.6:
                m[rng.choice(["reasoning_content", "reasoning"])] = rng.choice([text(), " \n", None])
            last = None
            if rng.random() < 0.6:
                m["tool_calls"] = last = calls(k3)
        out.append(m)
        if last and rng.random() < 0.8:
            results = [{"role": "tool", "tool_call_id": c["id"], "content": text()}
                       for c in last if rng.random() < 0.9]
            rng.shuffle(results)
            if rng.random() < 0.2:
                for r in results:
                    r["tool_call_id"] = rng.choice([r["tool_call_id"], "unknown"])
                    if rng.random() < 0.5:
                        r[rng.choice(["name", "tool"]) if k3 else "name"] = "named"
            if k3 and rng.random() < 0.1:
                for r in results:
                    r["id"] = r.pop("tool_call_id")
            out += results
    return out


def case(k3):
    r = {"messages": conversation(k3), "add_generation_prompt": rng.random() < 0.7}
    if rng.random() < 0.5:
        r["tools"] = tools()
    if k3:
        r["thinking"] = rng.random() < 0.7
        r["thinking_effort"] = rng.choice(["low", "high", "max"])
        r["tool_choice"] = rng.choice([None, "auto", "none", "required"])
        r["response_format"] = rng.choice([
            None, "json_object", {"type": "text"}, {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": obj()}},
            {"type": "json_schema", "json_schema": {"json_schema": obj()}},
            {"type": "json_schema", "json_schema": obj()}])
    return r


cases = []
for i in range(int(sys.argv[2])):
    k3 = i % 2 == 0
    r = case(k3)
    fn = reference.render_kimi_k3 if k3 else reference.render_kimi_linear
    cases.append({"family": "kimi_k3" if k3 else "kimi_linear", "request": r,
                  "segments": fn(**json.loads(json.dumps(r)))})
with open(sys.argv[3], "w", encoding="utf-8") as f:
    json.dump(cases, f, ensure_ascii=False)
