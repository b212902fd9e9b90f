"""The generated dialogues: repeatable, truthful, held out where they say so, in the engine's own format."""

import ast
import random
import re
import tempfile
import unittest

import calls
import data
import dialogues
import reference
import text
import words
from text import vocabulary


class Dialogues(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        data.write_vocabulary(cls.folder.name, 256, dialogue_count=80)
        cls.tokenizer = text.Tokenizer(cls.folder.name)
        cls.oracle = reference.Tokenizer(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def some(self, count, held=False, budget=400):
        rng = random.Random(7)
        return [dialogues.dialogue(rng, held, self.tokenizer.cost, budget) for _ in range(count)]

    def test_tokens_and_chat_format_are_the_oracles(self):
        for messages, tools in self.some(40):
            for thinking in (False, True):
                ids, mine = self.tokenizer.render(messages, tools, thinking)
                segments = reference.render_kimi_k3(
                    messages,
                    tools,
                    add_generation_prompt=False,
                    thinking=thinking,
                    literals=self.tokenizer.literals,
                )
                self.assertEqual(ids, self.oracle.segments(segments))
                self.assertEqual(len(ids), len(mine))
                prompt, _ = self.tokenizer.render(messages[:-1], tools, thinking, prompt=True)
                segments = reference.render_kimi_k3(
                    messages[:-1], tools, thinking=thinking, literals=self.tokenizer.literals
                )
                self.assertEqual(prompt, self.oracle.segments(segments))

    def test_what_the_model_writes_is_the_assistants_part(self):
        messages = [dialogues.say("user", "Where?"), dialogues.say("assistant", "Here.")]
        ids, mine = self.tokenizer.render(messages, thinking=True)
        written = self.tokenizer.decode([i for i, m in zip(ids, mine) if m])
        self.assertEqual(
            written,
            "<|close|>think<|sep|><|open|>response<|sep|>Here.<|close|>response<|sep|>"
            "<|close|>message<|sep|><|end_of_msg|>",
        )

    def test_same_seed_same_batch(self):
        draw = lambda number: data.batch(self.tokenizer, 3, number, 2, 512)
        self.assertEqual(draw(5), draw(5))
        self.assertNotEqual(draw(5), draw(6))

    def test_rows_have_the_length_asked_for(self):
        for length in (128, 256, 2048):
            ids, mine, _ = data.batch(self.tokenizer, 1, 1, 3, length)
            self.assertEqual({len(r) for r in ids + mine}, {length})
            self.assertTrue(all(any(r) for r in mine))

    def test_a_lost_state_is_answered_with_its_own_sentence(self):
        ids, _, resets = data.batch(self.tokenizer, 1, 1, 6, 512, losing=1.0)
        self.assertGreater(sum(map(len, resets)), 3)
        for row, positions in zip(ids, resets):
            for at in positions:
                self.assertEqual(at % data.GRID, 0)
                after = self.tokenizer.decode(row[at : at + 3 * data.GRID])
                self.assertIn(dialogues.NO_TEXT, after)

    def test_answers_stand_in_the_text(self):
        """Every name, code and number of an answer occurs in what the model was shown before it."""
        for messages, _ in self.some(150, budget=700):
            before = ""
            for m in messages:
                if m["role"] == "assistant" and m["content"] not in (dialogues.READY, dialogues.NO_TEXT):
                    shown = set(re.findall(r"[\w.:-]*\w", before.lower()))
                    for word in re.findall(r"[\w.:-]*\w", m["content"]):
                        if (
                            re.search(r"\d", word)
                            or word[0].isupper()
                            and word not in self.sentence_words()
                        ):
                            self.assertIn(word.lower(), shown, (m["content"], before[-400:]))
                before += " " + m["content"]

    @staticmethod
    def sentence_words():
        """Words of the answers that are the generator's own."""
        out = set()
        for _, answer in dialogues.SMALL_TALK:
            out.update(re.findall(r"\w+", answer))
        for group in dialogues.GROUPS:
            for wordings in group.values():
                out.update(re.findall(r"\w+", wordings[2]))
        for tool in calls.KNOWN:
            out.update(re.findall(r"\w+", tool.answer))
        return out | {"I", "The", "Project", "Team", "Plan", "In"}

    def test_evaluation_shares_no_name_with_training(self):
        rng = random.Random(1)
        for make in (words.made_up, words.name, words.code, words.coined):
            trained = {make(rng, False).lower() for _ in range(2000)}
            held = {make(rng, True).lower() for _ in range(2000)}
            self.assertFalse(trained & held)
        for bag in (words.NOUNS, words.PLACES, words.JOBS, words.FOODS, words.COLOURS, words.ADJECTIVES):
            self.assertGreaterEqual(sum(words.is_held_out(w) for w in bag), 2)
            trained = {words.pick(rng, bag, False) for _ in range(400)}
            self.assertFalse(trained & {words.pick(rng, bag, True) for _ in range(400)})

    @staticmethod
    def template_words():
        """Every word of the generator's own strings, and of the bags that both sides share."""
        told = list(vocabulary.CHAT_LITERALS.values())
        for bag in (words.COLUMNS, words.EXTENSIONS, words.EVENTS, words.STATES, words.MONTHS):
            told += bag
        for module in (dialogues, calls):
            with open(module.__file__, encoding="utf-8") as f:
                tree = ast.parse(f.read())
            documents = {
                n.body[0].value
                for n in ast.walk(tree)
                if isinstance(n, (ast.Module, ast.FunctionDef, ast.ClassDef))
                and isinstance(n.body[0], ast.Expr)
            }
            told += [
                n.value
                for n in ast.walk(tree)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in documents
            ]
        return {w for t in told for w in re.findall("[a-z]{3,}", t.lower())}

    def test_no_template_has_a_word_of_the_evaluation(self):
        found = self.template_words()
        self.assertLessEqual({"list", "lost", "weather", "june", "belongs"}, found)
        self.assertEqual([w for w in sorted(found) if words.is_held_out(w)], [])
        self.assertLessEqual(words.SHARED, found)  # no more than it must

    def test_questions_without_an_answer(self):
        """What they ask about is not in the text, or is there and the text does not say that of it."""
        rng, follows = random.Random(3), 0
        for number in range(600):
            held = number % 2 == 1
            kind = sorted(dialogues.UNANSWERED)[number % 3]
            pieces, facts = [], []
            make = rng.choice([make for make, _ in dialogues.TEXTS])
            for piece, some in make(rng, held):
                pieces.append(piece)
                facts += some if isinstance(some, list) else [some] if some else []
                if len(pieces) >= 12 and facts:
                    break
            last = rng.choice(facts)
            pair = dialogues.unanswered(rng, held, facts, "".join(pieces), {kind: 1.0}, last)
            if pair is None:  # a text that says everything of everything
                self.assertEqual(kind, "missing")
                continue
            question, answer = pair
            begin, _, end = answer.partition("...")
            self.assertEqual("..." + end, dialogues.UNSAID)
            self.assertTrue(set(re.findall(r"\w+", begin)) & set(re.findall(r"\w+", question)), pair)
            follows += question.startswith("And ")
            about = {f.subject for f in facts if re.search(r"\b%s\b" % re.escape(f.subject), question)}
            self.assertEqual(bool(about), kind == "missing", (question, pieces))
            self.assertFalse(any(question in f.asks for f in facts), (question, pieces))
        self.assertGreater(follows, 20)

    def test_some_questions_of_the_training_have_no_answer(self):
        answers = [
            m["content"]
            for messages, tools in self.some(400, budget=500)
            for m in messages
            if m["role"] == "assistant" and not tools
        ]
        share = sum(a.endswith(dialogues.UNSAID) for a in answers) / len(answers)
        self.assertTrue(0.12 < share < 0.24, share)

    def test_a_call_is_of_a_declared_tool_and_its_argument_stands_in_the_question(self):
        rng, names = random.Random(4), {False: set(), True: set()}
        several = 0
        for number in range(400):
            held = number % 2 == 1
            messages, tools = calls.calling(rng, held, self.tokenizer.cost, 700)
            declared = {t["function"]["name"]: t["function"] for t in tools}
            self.assertEqual(len(declared), len(tools))
            self.assertEqual(len({t["function"]["description"] for t in tools}), len(tools))
            several += len(tools) > 1
            names[held] |= set(declared) - {t.name for t in calls.KNOWN}
            for asked, call, result, answer in zip(*(messages[i::4] for i in range(4))):
                function = call["tool_calls"][0]["function"]
                self.assertEqual(result["name"], function["name"])
                properties = declared[function["name"]]["parameters"]["properties"]
                self.assertEqual(list(function["arguments"]), list(properties))
                (value,) = function["arguments"].values()
                self.assertIn(value, asked["content"])
                self.assertIn(value, answer["content"])
                for number_or_name in re.findall(r"[A-Z0-9][\w:-]+", answer["content"].split(" ", 1)[1]):
                    shown = asked["content"] + " " + result["content"]
                    self.assertIn(number_or_name, shown)
        self.assertGreater(several, 150)
        self.assertGreater(min(map(len, names.values())), 100)
        self.assertFalse(names[False] & names[True])
        for form in (r"^[A-Z]", r"[a-z][A-Z]", r"[A-Z]{2}", r"-", r"\.", r"_", r"\d$", r"^[a-z]+$"):
            for side in names.values():
                self.assertTrue(any(re.search(form, name) for name in side), form)

    def test_a_name_is_the_same_tokens_wherever_it_stands(self):
        """Except where it begins like a frequent word."""
        rng, same = random.Random(2), 0
        for _ in range(200):
            name = words.name(rng, False)
            alone, after = self.tokenizer.encode(name), self.tokenizer.encode("by " + name)
            same += after[-len(alone) :] == alone
        self.assertGreater(same, 180)


if __name__ == "__main__":
    unittest.main()
