"""The training: its chunked KDA and its checkpoints against the oracle, its optimiser, a run of some steps.

Needs PyTorch (tools/train/requirements.txt); without it the test is reported as skipped.
"""

import os
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    print(
        "SKIPPED, reason: PyTorch is not installed for",
        sys.executable,
        "- see tools/train/requirements.txt and tests/train/CMakeLists.txt",
    )
    sys.exit(77)

import numpy as np

import compare
import data
import eval as evaluation
import experts
import export
import kda
import model as models
import muon
import mxfp4
import recipe
import reference
import train

SMALL = models.Size(
    hidden=64,
    layers=4,
    full=(4,),
    kda_heads=2,
    heads=2,
    q_lora=32,
    kv_lora=32,
    dense_inter=96,
    moe_inter=32,
    experts=8,
    latent=32,
    block=2,
)


def uneven(model):
    """Every weight away from its neutral start value."""
    for name, x in model.named_parameters():
        if "res_proj" in name:
            x.data.normal_()
        elif "norm" in name:
            x.data.uniform_(0.6, 1.4)
    for name, x in model.named_buffers():
        if "correction" in name:
            x.normal_(std=0.1)
    return model


class ChunkedKda(unittest.TestCase):
    def inputs(self, t, dtype=torch.float64, steep=1.0):
        torch.manual_seed(t)
        q, k, v, f = (torch.randn(2, t, 3, 32, dtype=dtype) for _ in range(4))
        q, k = q / q.norm(dim=-1, keepdim=True) * 32**-0.5, k / k.norm(dim=-1, keepdim=True)
        return q, k, v, -5 * torch.sigmoid(4 * f * steep), torch.sigmoid(torch.randn(2, t, 3, dtype=dtype))

    def test_is_the_oracles_recurrence(self):
        for t in (1, 31, 32, 33, 150):
            parts, first = self.inputs(t), torch.randn(2, 3, 32, 32, dtype=torch.float64)
            for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
                o, last = kda.chunked(*(x.to(dtype) for x in parts), first=first.to(dtype))
                for b in range(2):
                    right_o, right_s = reference.kda_recurrent(
                        *(x[b].numpy() for x in parts), first[b].numpy()
                    )
                    self.assertLess(np.abs(o[b].numpy() - right_o).max(), bound)
                    self.assertLess(np.abs(last[b].numpy() - right_s).max(), bound)

    def test_gradients_are_the_recurrences(self):
        mine = [x.requires_grad_() for x in self.inputs(70)]
        o, s = kda.chunked(*mine)
        weigh = torch.randn_like(o)
        ((o * weigh).sum() + s.sum()).backward()
        other = [x.detach().clone().requires_grad_() for x in mine]
        q, k, v, g, beta = other
        state, out = torch.zeros(2, 3, 32, 32, dtype=torch.float64), []
        for i in range(70):
            state = g[:, i].exp()[..., None] * state
            fix = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhd,bhdv->bhv", k[:, i], state))
            state = state + torch.einsum("bhd,bhv->bhdv", k[:, i], fix)
            out.append(torch.einsum("bhd,bhdv->bhv", q[:, i], state))
        ((torch.stack(out, 1) * weigh).sum() + state.sum()).backward()
        for a, b in zip(mine, other):
            self.assertLess(float((a.grad - b.grad).abs().max()), 1e-11)

    def test_the_steepest_decay_stays_finite_in_float32(self):
        q, k, v, g, beta = self.inputs(96, torch.float32)
        parts = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, -4.9999), beta)]
        o, _ = kda.chunked(*parts)
        o.sum().backward()
        self.assertTrue(all(bool(x.isfinite().all()) for x in [o] + [p.grad for p in parts]))

    def test_forgetting_a_state_is_starting_again(self):
        parts = self.inputs(128)
        keep = torch.ones(2, 4)
        keep[:, 2] = 0
        o, last = kda.chunked(*parts, keep=keep)
        again, last_again = kda.chunked(*(x[:, 64:] for x in parts))
        self.assertLess(float((o[:, 64:] - again).abs().max() + (last - last_again).abs().max()), 1e-12)


class Checkpoint(unittest.TestCase):
    def test_logits_and_states_are_the_oracles(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(1)
            size = data.write_vocabulary(folder, 64, dialogue_count=20)
            model = uneven(models.Model(models.dataclasses.replace(SMALL, vocab=size)))
            export.export(model, folder, os.path.join(folder, "out"), {"seed": 1})
            export.as_published(model).double()
            oracle = reference.Model(os.path.join(folder, "out"))
            for t in (1, 64, 150):
                tokens = torch.randint(0, size, (1, t))
                right, state = oracle.run(tokens[0].tolist())
                with torch.no_grad():
                    whole, _ = model(tokens)
                    mine, cut = {}, min(t, 37)
                    parts = [
                        model(part, state=mine)[0]
                        for part in (tokens[:, :cut], tokens[:, cut:])
                        if part.numel()
                    ]
                self.assertLess(np.abs(whole.numpy() - right).max(), 1e-9)
                self.assertLess(np.abs(torch.cat(parts).numpy() - right).max(), 1e-9)
                for i in state.S:
                    self.assertLess(np.abs(mine["S", i][0].numpy() - state.S[i]).max(), 1e-9)

    def test_published_experts_are_the_trained_ones(self):
        w = torch.randn(40, 64) * torch.logspace(-3, 1, 40)[:, None]
        codes, scales = export.published.to_mxfp4(mxfp4.rounded(w).numpy())
        self.assertTrue(
            np.array_equal(reference.mxfp4_decode(codes, scales), mxfp4.rounded(w).double().numpy())
        )
        self.assertTrue(torch.equal(mxfp4.rounded(mxfp4.rounded(w)), mxfp4.rounded(w)))
        w.requires_grad_()
        (mxfp4.straight_through(w) * 3).sum().backward()
        self.assertTrue(torch.equal(w.grad, torch.full_like(w, 3)))


class Recipe(unittest.TestCase):
    def test_quantile_balancing_evens_the_load(self):
        torch.manual_seed(0)
        bias, worst = torch.zeros(8), []
        for _ in range(6):
            scores = torch.sigmoid(torch.randn(2000, 8) + torch.linspace(-2, 2, 8))
            counts = torch.bincount(torch.topk(scores + bias, 2).indices.flatten(), minlength=8)
            worst.append(float(counts.max() / counts.float().mean()))
            bias = experts.balanced_bias(scores, bias, 2)
        self.assertGreater(worst[0], 2)
        self.assertLess(worst[-1], 1.2)

    def test_settling_evens_the_load_of_texts_that_it_did_not_see(self):
        stage = recipe.Stage("publish", 1024, {128: 0.5, 256: 0.5})
        with tempfile.TemporaryDirectory() as folder:
            trainer = train.Trainer(folder, 1, [stage], 1024, SMALL, low=torch.float32)
            uneven(trainer.model)

            def worst():
                busiest = evaluation.busiest_experts(trainer.model, trainer.tokenizer, stage, 4)
                self.assertEqual(list(busiest), [2, 3, 4])
                return max(busiest.values())

            before = worst()
            trainer.settle(stage, batches=16)
            self.assertGreater(before, 1.5)
            self.assertLess(worst(), 1.3)

    def test_one_gradient_that_is_not_finite_spoils_one_step(self):
        stages = [recipe.Stage("copy", 16 * 1024, {128: 1.0}, first=True)]
        with tempfile.TemporaryDirectory() as folder:
            trainer = train.Trainer(folder, 1, stages, 1024, SMALL)
            weight = trainer.model.model.norm.weight
            layer = trainer.model.model.layers[1].self_attn
            for spoil in (  # a gradient; what is computed, and with it the scores of later routers
                lambda: weight.register_hook(lambda g: g * float("inf")),
                lambda: layer.register_forward_hook(lambda module, given, out: out * float("inf")),
            ):
                hook = spoil()
                spoiled = trainer.train(until_step=trainer.step + 1, quiet=True)
                hook.remove()
                after = trainer.train(until_step=trainer.step + 2, quiet=True)
                self.assertFalse(np.isfinite(spoiled[0]["gradient"]))
                self.assertTrue(all(np.isfinite(r["gradient"]) for r in after))
            for name, bias in trainer.model.named_buffers():
                self.assertTrue(bool(bias.isfinite().all()), name)

    def test_a_run_goes_on_only_as_the_model_that_it_is(self):
        stages = [recipe.Stage("copy", 16 * 1024, {128: 1.0}, first=True)]
        with tempfile.TemporaryDirectory() as folder:
            train.Trainer(folder, 1, stages, 1024, SMALL).train(until_step=1, quiet=True)
            other = models.dataclasses.replace(SMALL, rotate=True)
            with self.assertRaisesRegex(SystemExit, "architecture"):
                train.Trainer(folder, 1, stages, 1024, other)
            with self.assertRaisesRegex(SystemExit, "was made with --products bfloat16; use that"):
                train.Trainer(folder, 1, stages, 1024, SMALL, low=torch.float32)

    def test_stopped_while_settling_a_run_settles_again(self):
        stages = [recipe.Stage("copy", 3 * 1024, {128: 1.0}, first=True)]
        with tempfile.TemporaryDirectory() as folder:
            trainer = train.Trainer(folder, 1, stages, 1024, SMALL)
            trainer.train(until_step=2, quiet=True)

            def stopped(stage):
                raise KeyboardInterrupt

            trainer.settle = stopped
            with self.assertRaises(KeyboardInterrupt):
                trainer.train(quiet=True)
            self.assertEqual(len(train.Trainer(folder, 1, stages, 1024, SMALL).train(quiet=True)), 1)
            self.assertTrue(os.path.exists(os.path.join(folder, "after-copy.pt")))

    def test_experts_through_slots_are_experts_one_by_one(self):
        torch.manual_seed(0)
        x, w = torch.randn(50, 16, dtype=torch.float64, requires_grad=True), torch.randn(
            4, 16, 16, dtype=torch.float64
        )
        chosen = torch.rand(50, 4).topk(2).indices
        weights = torch.rand(50, 2, dtype=torch.float64, requires_grad=True)
        plan = experts.Plan(chosen, 4, None)
        rows = experts.Dispatch.apply(x, plan).view(4, plan.capacity, 16)
        y = experts.Combine.apply(torch.bmm(rows, w).view(-1, 16), weights, plan)
        one = (torch.einsum("ti,tkio->tko", x, w[chosen]) * weights[..., None]).sum(1)
        self.assertTrue(torch.allclose(y, one))
        up = torch.randn_like(y)
        for a, b in zip(
            torch.autograd.grad((y * up).sum(), (x, weights)),
            torch.autograd.grad((one * up).sum(), (x, weights)),
        ):
            self.assertTrue(torch.allclose(a, b))

    def test_heads_are_orthogonalised_one_by_one(self):
        torch.manual_seed(0)
        g = torch.randn(4, 32, 96) * torch.tensor([1e-3, 1, 10, 1e3])[:, None, None]
        values = torch.linalg.svdvals(muon.orthogonalised(g))
        self.assertGreater(float(values.min()), 0.3)
        self.assertLess(float(values.max()), 1.4)

    def test_loss_falls_and_a_stopped_run_goes_on_unchanged(self):
        stages = [
            recipe.Stage("copy", 16 * 1024, {128: 1.0}, first=True),
            recipe.Stage("publish", 24 * 1024, {256: 1.0}, quantised=True, rate=(1.0, 0.5)),
        ]
        with tempfile.TemporaryDirectory() as folder:
            one, two = os.path.join(folder, "one"), os.path.join(folder, "two")
            rows = train.Trainer(one, 1, stages, 1024, SMALL).train(quiet=True)
            self.assertEqual(len(rows), 40)
            first, last = (sum(r["loss"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
            self.assertLess(last, first - 2.0)
            train.Trainer(two, 1, stages, 1024, SMALL).train(until_step=11, quiet=True)
            rest = train.Trainer(two, 1, stages, 1024, SMALL).train(quiet=True)
            self.assertEqual([r["loss"] for r in rest], [r["loss"] for r in rows[11:]])
            model, saved = export.load(os.path.join(one, "latest.pt"))
            self.assertEqual(saved["step"], 40)
            tokenizer = train.Tokenizer(os.path.join(one, "vocabulary"))
            right, asked = evaluation.accuracy(model, tokenizer, 256, 2)
            for how in (
                {"make": evaluation.unanswered, "kind": "missing"},
                {"make": evaluation.tool_dialogue, "known": True},
                {"make": evaluation.tool_dialogue, "known": False},
            ):
                some, of = evaluation.accuracy(model, tokenizer, 300, 2, **how)
                self.assertTrue(0 <= some <= of and of > 0, how)
            lost = evaluation.after_loss(model, tokenizer, 256, 1)
            self.assertTrue(0 <= right <= asked and asked > 0)
            self.assertEqual(sorted(lost), ["kda", "latents", "nothing", "other"])

    def test_memory_is_counted_by_layer(self):
        kda = 2 * 32 * (32 + 3 * 3)  # floats: a matrix a head, three rows of three filters
        for full, fixed, each in (((4,), 3 * 4 * kda, 4 * 48), ((1, 2, 3, 4), 0, 4 * 4 * 48)):
            model = models.Model(models.dataclasses.replace(SMALL, full=full))
            self.assertEqual(compare.memory(model), (fixed, each))

    def test_rotary_positions_tell_the_distance_alone(self):
        torch.manual_seed(0)
        q, k = (torch.randn(1, 1, 16, dtype=torch.float64) for _ in range(2))
        product = lambda a, b: float((models.rotated(q, a) * models.rotated(k, b)).sum())
        self.assertAlmostEqual(product(700, 641), product(59, 0), places=4)
        self.assertNotAlmostEqual(product(700, 641), product(700, 640), places=4)
        size = models.dataclasses.replace(SMALL, full=(1, 2, 3, 4), rotate=True)
        model, tokens = uneven(models.Model(size)), torch.randint(0, size.vocab, (1, 100))
        with torch.no_grad():
            state, whole = {}, model(tokens, state={})[0]
            parts = [model(part, state=state)[0] for part in (tokens[:, :37], tokens[:, 37:])]
        self.assertLess(float((torch.cat(parts) - whole).abs().max()), 1e-4)

    def test_attention_is_causal_and_its_values_may_be_narrower(self):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 600, n, dtype=torch.float64, requires_grad=True) for n in (8, 8, 5))
        o = models.attention(q, k, v, 0.5)
        scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(
            torch.ones(600, 600).triu(1).bool(), float("-inf")
        )
        right = torch.softmax(scores, -1) @ v
        self.assertTrue(torch.allclose(o, right))
        up = torch.randn_like(o)
        for a, b in zip(
            torch.autograd.grad((o * up).sum(), (q, k, v)),
            torch.autograd.grad((right * up).sum(), (q, k, v)),
        ):
            self.assertTrue(torch.allclose(a, b))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
