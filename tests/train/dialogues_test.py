"""The generated dialogues: repeatable, truthful, held out where they say so, in the engine's own format."""

import random
import re
import tempfile
import unittest

import data
import dialogues
import reference
import text
import words


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
        out = {dialogues.UNKNOWN.split()[0]}
        for _, answer in dialogues.SMALL_TALK:
            out.update(re.findall(r"\w+", answer))
        for group in dialogues.GROUPS:
            for wordings in group.values():
                out.update(re.findall(r"\w+", wordings[2]))
        for tool in dialogues.TOOLS.values():
            out.update(re.findall(r"\w+", tool[6]))
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
