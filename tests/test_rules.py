"""Each rule on traces written by hand: what it must see, what it must leave alone, and what it cannot judge."""

import math

import numpy as np
import pytest

import replay
from replay.check import examine
from replay.rules import RULES
from tests.written import module, write_trace

LINEAR = ("weight", [8, 8])


def look(path, rule, **thresholds):
    """What one rule finds: (layer, kind, first step, last step)."""
    chosen = [each for each in RULES if each.name == rule]
    report = examine(replay.open(path), rules=chosen, thresholds={f"{rule}.{n}": v for n, v in thresholds.items()})
    assert rule not in report.not_applicable, report.not_applicable
    return [(found.layer, found.kind, found.first_step, found.last_step) for found in report.findings]


def reason(path, rule):
    """Why a rule cannot judge."""
    report = examine(replay.open(path), rules=[each for each in RULES if each.name == rule])
    assert not report.findings
    return report.not_applicable[rule]


def steps(count, *records):
    """The same records in each step; a value may be a function of the step."""
    for step in range(count):
        for record in records:
            yield {"step": step, **{name: v(step) if callable(v) else v for name, v in record.items()}}


class TestNonFinite:
    def test_the_first_in_the_order_of_execution_is_named(self, tmp_path):
        records = steps(4, {"layer": "a"}, {"layer": "b", "n_nan": lambda s: 5 * (s > 1)}, {"layer": "c", "n_nan": 1})

        assert look(write_trace(tmp_path / "t", records), "non-finite") == [("c", "output", 0, 3)]

    @pytest.mark.parametrize(
        ("bad_input", "words"), [(0, "its input is finite"), (1, "its input is not finite either")]
    )
    def test_it_says_whether_the_input_was_finite(self, tmp_path, bad_input, words):
        # The input is written after the output here, so the order alone does not tell.
        layers = {"layer": "a", "n_posinf": 1}, {"layer": "a", "kind": "input", "path": "0", "n_nan": bad_input}
        trace = replay.open(write_trace(tmp_path / "t", steps(1, *layers)))

        assert words in replay.check(trace)[0].message

    def test_gradients_of_a_step_that_the_scaler_skipped_are_regular(self, tmp_path):
        records = steps(3, {"layer": "a"}, {"layer": "a", "kind": "grad_output", "n_posinf": lambda s: int(s == 1)})
        path = write_trace(tmp_path / "t", records, scalars=[(1, "hookrec/skipped", 1.0)])

        assert look(path, "non-finite") == []

    def test_gradients_of_a_step_that_was_not_skipped_are_not(self, tmp_path):
        records = steps(3, {"layer": "a", "kind": "grad_output", "n_posinf": lambda s: int(s > 0)})
        path = write_trace(tmp_path / "t", records, scalars=[(1, "hookrec/skipped", 1.0)])

        assert look(path, "non-finite") == [("a", "grad_output", 2, 2)]

    def test_a_mask_that_is_an_input_is_regular(self, tmp_path):
        mask = {"layer": "a", "kind": "input", "path": "mask", "n_zero": 60, "n_neginf": lambda s: 40 * (s > 2)}
        records = steps(5, {**mask, "numel": lambda s: 100 if s > 2 else 60}, {"layer": "a"})

        assert look(write_trace(tmp_path / "t", records), "non-finite") == []

    def test_minus_infinity_in_each_record_is_a_mask_unless_the_loss_is_infinite(self, tmp_path):
        records = list(steps(3, {"layer": "a", "n_neginf": 7}))
        fine = write_trace(tmp_path / "fine", records, scalars=[(s, "loss", 1.0) for s in range(3)])
        bad = write_trace(tmp_path / "bad", records, scalars=[(s, "loss", math.inf) for s in range(3)])

        assert look(fine, "non-finite") == []
        assert look(bad, "non-finite") == [("a", "output", 0, 2)]

    def test_a_loss_alone_that_is_not_finite_is_reported(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(3, {"layer": "a"}), scalars=[(1, "loss", math.nan), (0, "loss", 1.0)])

        assert look(path, "non-finite") == [(None, "loss", 1, 1)]

    def test_a_late_record_of_an_earlier_step_comes_first(self, tmp_path):
        records = [{"step": 1, "layer": "a", "n_nan": 1}, {"step": 0, "layer": "b", "kind": "grad_output", "n_nan": 1}]

        assert look(write_trace(tmp_path / "t", records), "non-finite") == [("b", "grad_output", 0, 1)]


class TestGradients:
    def chain(self, *norms, kind="grad_output", count=12):
        """Layers 0, 1, … whose gradients arrive from the last to the first."""
        records = [{"layer": str(n), "kind": kind, "l2": norm} for n, norm in enumerate(norms)]
        return steps(count, *reversed(records))

    def test_vanishing_names_the_layer_where_it_is_least(self, tmp_path):
        path = write_trace(tmp_path / "t", self.chain(1e-9, 1e-6, 1e-3, 1.0))

        assert look(path, "vanishing-gradients") == [("0", "grad_output", 0, 11)]

    def test_a_side_branch_does_not_vanish(self, tmp_path):
        path = write_trace(tmp_path / "t", self.chain(0.5, 1e-9, 0.7, 1.0))

        assert look(path, "vanishing-gradients") == []

    def test_what_is_left_of_a_gradient_with_nan_says_nothing(self, tmp_path):
        records = {"layer": "1", "kind": "grad_output"}, {"layer": "0", "kind": "grad_output", "l2": 1e-9, "n_nan": 90}

        assert look(write_trace(tmp_path / "t", steps(12, *records)), "vanishing-gradients") == []

    def test_gradients_that_grow_backwards_do_not_vanish_at_the_end(self, tmp_path):
        path = write_trace(tmp_path / "t", self.chain(1e9, 1e6, 1e3, 1.0))

        assert look(path, "vanishing-gradients") == []
        assert look(path, "exploding-gradients") == [("0", "grad_output", 0, 11)]

    def test_a_loss_that_is_a_module_is_no_measure(self, tmp_path):
        loss = {"layer": "loss", "kind": "grad_output", "l2": 1.0, "numel": 1}
        rest = [{"layer": str(n), "kind": "grad_output", "l2": 1e-6} for n in range(3)]

        assert look(write_trace(tmp_path / "t", steps(12, loss, *rest)), "vanishing-gradients") == []

    def test_gradients_of_weights_serve_where_others_are_missing(self, tmp_path):
        modules = [module(str(n), "Linear", LINEAR) for n in range(3)]
        # The optimizer meets them in the order of the model.
        grads = [{"layer": str(n), "kind": "param_grad", "path": "weight", "l2": 1e-4 ** (2 - n)} for n in range(3)]
        path = write_trace(tmp_path / "t", steps(12, *grads), modules)

        assert look(path, "vanishing-gradients", ratio=1e-3) == [("0", "param_grad", 0, 11)]

    def test_a_scaled_gradient_is_divided_by_its_scale(self, tmp_path):
        # Doubled at step 30, as scalers do: the gradient itself stays what it was.
        grad = {"layer": "a", "kind": "grad_output", "l2": lambda s: 1.0 if s < 30 else 4096.0}
        scalars = [(s, "hookrec/grad_scale", 1.0 if s < 30 else 4096.0) for s in range(40)]
        path = write_trace(tmp_path / "t", list(steps(40, grad)), scalars=scalars)
        unscaled = write_trace(tmp_path / "u", list(steps(40, grad)))

        assert look(path, "gradient-spike") == []
        assert look(unscaled, "gradient-spike")[0][:3] == ("a", "grad_output", 30)


class TestNotLearning:
    MODULES = (module("a", "Linear", LINEAR), module("b", "Linear", LINEAR), module("c", "Linear", ("weight", [3, 8])))

    def test_a_gradient_that_stops_is_found_where_it_stops(self, tmp_path):
        grads = ({"layer": "b", "kind": "grad_output"}, {"layer": "a", "kind": "grad_output", "l2": lambda s: s < 9})
        path = write_trace(tmp_path / "t", steps(30, *grads), self.MODULES)

        assert look(path, "not-learning") == [("a", "grad_output", 9, 29)]

    def test_zeros_everywhere_are_no_matter_of_a_layer(self, tmp_path):
        grads = [{"layer": name, "kind": "grad_output", "l2": lambda s: s < 9} for name in "ab"]

        assert look(write_trace(tmp_path / "t", steps(30, *grads), self.MODULES), "not-learning") == []

    def test_a_layer_that_is_meant_to_be_frozen_is_left_alone(self, tmp_path):
        frozen = module("a", "Linear", LINEAR, requires_grad=False)
        values = {"kind": "param", "path": "weight"}
        records = [{"layer": "a"}, {"layer": "b"}, {"layer": "b", "kind": "grad_output"}]
        records += [{"layer": "a", **values}, {"layer": "b", **values, "mean": lambda s: s}]
        path = write_trace(tmp_path / "t", steps(30, *records), [frozen, self.MODULES[1]])

        assert look(path, "not-learning") == []

    def test_a_layer_that_never_ran_is_left_alone(self, tmp_path):
        records = {"layer": "b"}, {"layer": "b", "kind": "grad_output"}

        assert look(write_trace(tmp_path / "t", steps(30, *records), self.MODULES), "not-learning") == []

    def test_a_tied_weight_is_recorded_once_and_does_learn(self, tmp_path):
        update = {"layer": "a", "kind": "update", "path": "weight"}
        records = {"layer": "a"}, {"layer": "b"}, update
        path = write_trace(tmp_path / "t", steps(30, *records), self.MODULES[:2])
        apart = write_trace(tmp_path / "u", steps(30, *records, {"layer": "c"}), self.MODULES)

        assert look(path, "not-learning") == []
        assert look(apart, "not-learning") == [("c", "update", 0, 29)]  # its shape is that of no other

    def test_a_parameter_that_stays_the_same_is_found_by_its_values(self, tmp_path):
        params = [
            {"layer": name, "kind": "param", "path": "weight", "mean": lambda s, name=name: s * (name == "b")}
            for name in "ab"
        ]

        path = write_trace(tmp_path / "t", steps(30, *params), self.MODULES)
        assert look(path, "not-learning") == [("a", "param", 1, 29)]

    def test_one_parameter_without_gradient_is_not_the_layer(self, tmp_path):
        modules = [module("a", "Conv2d", ("weight", [4, 4, 3, 3]), ("bias", [4])), self.MODULES[1]]
        records = [
            {"layer": "a", "kind": "update", "path": "weight"},
            {"layer": "a", "kind": "update", "path": "bias", "l2": 0.0},  # a bias before a normalisation
            {"layer": "b", "kind": "update", "path": "weight"},
        ]

        assert look(write_trace(tmp_path / "t", steps(30, *records), modules), "not-learning") == []

    def test_inference_cannot_be_judged(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(30, {"layer": "a", "kind": "grad_output", "l2": 0.0}), self.MODULES)

        assert "inference" in reason(path, "not-learning")


class TestActivations:
    def test_a_relu_is_dead_from_the_step_on_at_which_it_died(self, tmp_path):
        relu = {"layer": "a", "n_zero": lambda s: 100 if s >= 7 else 60}
        path = write_trace(tmp_path / "t", steps(20, relu), [module("a", "ReLU")])

        assert look(path, "dead-relu") == [("a", "output", 7, 19)]

    def test_sparse_is_not_dead(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(20, {"layer": "a", "n_zero": 97}), [module("a", "ReLU")])

        assert look(path, "dead-relu") == []
        assert look(path, "dead-relu", share=0.95) == [("a", "output", 0, 19)]

    def test_dead_now_and_then_is_not_dead(self, tmp_path):
        relu = {"layer": "a", "n_zero": lambda s: 100 if s % 5 else 50}
        path = write_trace(tmp_path / "t", steps(30, relu), [module("a", "ReLU")])

        assert look(path, "dead-relu") == []

    @pytest.mark.parametrize(("kind", "as_input", "expected"), [("Tanh", 0, 1), ("Sigmoid", 1, 1), ("Sigmoid", 0, 0)])
    def test_saturated_units_feed_a_layer(self, tmp_path, kind, as_input, expected):
        # All values at the ends: ±1 of a tanh; 0 and 1, half of each, of a sigmoid.
        ends = {"l2": 10.0, "mean": 0.0} if kind == "Tanh" else {"l2": math.sqrt(50), "mean": 0.5}
        feeds = {"layer": "b", "kind": "input", "path": "0", "l2": ends["l2"] if as_input else 3.0}
        modules = [module("a", kind), module("b", "Linear", LINEAR)]
        path = write_trace(tmp_path / "t", steps(20, {"layer": "a", **ends}, feeds, {"layer": "b"}), modules)

        assert look(path, "saturated") == [("a", "output", 0, 19)] * expected

    def test_what_a_model_puts_out_may_be_saturated(self, tmp_path):
        modules = [module("a", "Linear", LINEAR), module("b", "Tanh")]
        path = write_trace(tmp_path / "t", steps(20, {"layer": "a"}, {"layer": "b", "l2": 10.0}), modules)

        assert look(path, "saturated") == []

    def test_drift_is_to_leave_the_range_of_all_layers_for_good(self, tmp_path):
        def std(step):
            return 1.0 if step < 70 else 1000.0

        records = {"layer": "a", "std": std}, {"layer": "b", "std": lambda s: 1e-3 * std(s)}, {"layer": "c"}
        modules = [module("a"), module("b"), module("c", "Linear", LINEAR)]
        path = write_trace(tmp_path / "t", steps(120, *records), modules)

        assert look(path, "activation-drift") == [("a", "output", 70, 119)]  # b has come to what others had

    def test_drift_that_is_over_is_none(self, tmp_path):
        records = {"layer": "a", "std": lambda s: 1e3 if 60 < s < 100 else 1.0}, {"layer": "c"}
        path = write_trace(tmp_path / "t", steps(120, *records), [module("a"), module("c", "Linear", LINEAR)])

        assert look(path, "activation-drift") == []

    def test_a_batch_that_is_smaller_may_differ_more(self, tmp_path):
        noise = np.random.default_rng(0).normal(0, 0.05, 40)

        def batch(numel):
            return {
                "layer": "a",
                "kind": "input",
                "mean": lambda s: 0.8 if s == 30 else noise[s],
                "numel": lambda s: numel if s == 30 else 100,
                "l2": lambda s: math.sqrt(numel) if s == 30 else 10.0,
            }

        assert look(write_trace(tmp_path / "t", steps(40, batch(100))), "input-outlier") == [("a", "input", 30, 30)]
        assert look(write_trace(tmp_path / "u", steps(40, batch(4))), "input-outlier") == []

    def test_evaluation_between_steps_is_not_looked_at(self, tmp_path):
        records = list(steps(40, {"layer": "a"}, {"layer": "a", "l2": 1e4, "std": 1e3, "call": 1, "mode": "eval"}))
        records = [record for record in records if record.get("mode") != "eval" or record["step"] == 30]
        path = write_trace(tmp_path / "t", records, [module("a", "Linear", LINEAR)])

        assert examine(replay.open(path)).findings == []

    def test_a_constant_of_one_element_is_no_constant(self, tmp_path):
        records = {"layer": "a", "std": 0.0}, {"layer": "b", "std": 0.0, "numel": 1}

        assert look(write_trace(tmp_path / "t", steps(20, *records)), "constant-output") == [("a", "output", 0, 19)]


class TestHalfPrecision:
    def grad(self, dtype="float16", **facts):
        return {"layer": "a", "kind": "grad_output", "dtype": dtype, **facts}

    def test_zeros_next_to_the_smallest_number_are_underflow(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(9, self.grad(n_zero=64, l2=6 * 2.0**-23)))

        assert look(path, "half-underflow") == [("a", "grad_output", 0, 8)]

    def test_zeros_behind_a_relu_are_not(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(9, self.grad(n_zero=64, l2=1e-2)))

        assert look(path, "half-underflow") == []

    def test_float32_is_not_judged(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(9, self.grad("float32", n_zero=64, l2=1e-9)))

        assert "no grad_output is in float16" in reason(path, "half-underflow")

    def test_what_was_scaled_is_judged_as_it_was_stored(self, tmp_path):
        # 1e-9 of the loss, but 6e-5 as float16 has it: nothing is lost.
        scalars = [(s, "hookrec/grad_scale", 65536.0) for s in range(9)]
        path = write_trace(tmp_path / "t", steps(9, self.grad(n_zero=64, l2=6 * 6e-5)), scalars=scalars)

        assert look(path, "half-underflow") == []

    @pytest.mark.parametrize(("absmax", "expected"), [(40000.0, 1), (65504.0, 0), (1000.0, 0)])
    def test_overflow_is_near_and_a_mask_exactly_the_largest_number(self, tmp_path, absmax, expected):
        path = write_trace(tmp_path / "t", steps(9, {"layer": "a", "dtype": "float16", "absmax": absmax}))

        assert look(path, "half-overflow") == [("a", "output", 0, 8)] * expected

    @pytest.mark.parametrize(("every", "expected"), [(3, 1), (100, 0)])
    def test_a_scaler_that_skips_again_and_again(self, tmp_path, every, expected):
        scale = [(s, "hookrec/grad_scale", 2.0) for s in range(200)]
        # In the first steps a scaler looks for its scale.
        skipped = [(s, "hookrec/skipped", 1.0) for s in range(200) if s < 15 or s % every == 0]
        path = write_trace(tmp_path / "t", steps(200, {"layer": "a"}), scalars=scale + skipped)

        assert [layer for layer, *_ in look(path, "skipped-steps")] == [None] * expected


class TestLearning:
    MODULES = (module("a", "Linear", LINEAR), module("b", "Linear", LINEAR))

    def parameters(self, ratio_a, ratio_b=lambda s: 1e-3, norm=10.0):
        for layer, ratio in (("a", ratio_a), ("b", ratio_b)):
            yield {"layer": layer, "kind": "param", "path": "weight", "l2": norm}
            yield {"layer": layer, "kind": "update", "path": "weight", "l2": lambda s, ratio=ratio: norm * ratio(s)}

    def test_one_large_update_is_found(self, tmp_path):
        records = steps(60, *self.parameters(lambda s: 0.5 if s == 40 else 1e-3))

        assert look(write_trace(tmp_path / "t", records, self.MODULES), "large-updates") == [("a", "update", 40, 40)]

    def test_large_updates_in_the_first_steps_are_regular(self, tmp_path):
        records = steps(60, *self.parameters(lambda s: 0.5 if s < 15 else 1e-3))

        assert look(write_trace(tmp_path / "t", records, self.MODULES), "large-updates") == []

    def test_weights_that_are_about_zero_are_no_measure(self, tmp_path):
        records = steps(60, *self.parameters(lambda s: 0.5, norm=0.01))

        assert look(write_trace(tmp_path / "t", records, self.MODULES), "large-updates") == []

    def test_one_layer_far_slower_than_the_others_is_found(self, tmp_path):
        records = steps(60, *self.parameters(lambda s: 1e-9))

        assert look(write_trace(tmp_path / "t", records, self.MODULES), "small-updates") == [("a", "update", 0, 59)]

    def test_a_learning_rate_that_ends_at_zero_is_regular(self, tmp_path):
        def decayed(step):
            return 1e-3 * (1 - step / 60) ** 4

        path = write_trace(tmp_path / "t", steps(60, *self.parameters(decayed, decayed)), self.MODULES)
        assert look(path, "small-updates") == []

    def test_small_updates_of_all_at_the_end_of_a_long_training_are_regular(self, tmp_path):
        def ended(step):
            return 1e-3 if step < 50 else 1e-9

        path = write_trace(tmp_path / "t", steps(400, *self.parameters(ended, ended)), self.MODULES)

        assert replay.check(replay.open(path), since=399) == []

    @pytest.mark.parametrize("parted", [True, False])
    def test_an_embedding_and_a_head_are_compared(self, tmp_path, parted):
        modules = [module("tokens", "Embedding", LINEAR), module("head", "Linear", LINEAR)]
        param = {"kind": "param", "path": "weight", "mean": lambda s: 0.5 + s}
        other = {**param, "layer": "head", "mean": lambda s: 0.5 + s + (1e-9 if parted and s > 3 else 0)}
        path = write_trace(tmp_path / "t", steps(9, {**param, "layer": "tokens"}, other), modules)

        assert look(path, "untied-weights") == [("head", "param", 4 if parted else 0, 8)]

    def test_copies_of_a_layer_are_meant_to_be_copies(self, tmp_path):
        params = [{"layer": n, "kind": "param", "path": "weight", "mean": lambda s, n=n: s * (n == "a")} for n in "ab"]

        assert look(write_trace(tmp_path / "t", steps(9, *params), self.MODULES), "untied-weights") == []

    def loss(self, path, *values):
        scalars = [(step, "loss", float(value)) for step, value in enumerate(values)]
        return write_trace(path, steps(2, {"layer": "a"}), scalars=scalars)

    def test_a_loss_that_falls_is_not_reported_and_one_that_does_not_is(self, tmp_path):
        noise = np.random.default_rng(0).normal(0, 0.02, 300)

        assert look(self.loss(tmp_path / "t", *(2 + noise - np.arange(300) / 1e3)), "loss-not-falling") == []
        assert look(self.loss(tmp_path / "u", *(2 + noise)), "loss-not-falling") == [(None, "loss", 240, 299)]

    def test_a_spike_lasts_and_is_higher_than_the_beginning(self, tmp_path):
        falling = 0.05 + 2 * 0.7 ** np.arange(100)
        once, twice, hard = falling.copy(), falling.copy(), falling.copy()
        once[60], twice[60:62], hard[60:62] = 9.0, 9.0, 1.0

        assert look(self.loss(tmp_path / "t", *twice), "loss-spike") == [(None, "loss", 60, 61)]
        assert look(self.loss(tmp_path / "u", *once), "loss-spike") == []
        assert look(self.loss(tmp_path / "v", *hard), "loss-spike") == []


class TestRanks:
    def ranks(self, path, *values, kind="param_grad", count=20, stat="l2"):
        for rank, value in enumerate(values):
            records = [{"layer": name, "kind": kind, "path": "weight" * (kind[:5] == "param")} for name in "abc"]
            records[1][stat] = value
            modules = [module(name, "Linear", LINEAR) for name in "abc"]
            write_trace(path, steps(count, *records), modules, rank=rank)
        return path

    def test_a_gradient_that_differs_after_reduction(self, tmp_path):
        path = self.ranks(tmp_path / "t", 5.0, 5.0, lambda s: 5.0 if s < 8 else 6.0)

        assert look(path, "ranks-disagree") == [("b", "param_grad", 8, 19)]
        assert replay.check(replay.open(path))[0].rank == 2

    def test_rounding_is_no_disagreement(self, tmp_path):
        assert look(self.ranks(tmp_path / "t", 5.0, 5.0001), "ranks-disagree") == []

    def test_shards_are_not_compared(self, tmp_path):
        for rank in range(2):
            records = [{"layer": n, "kind": "param", "path": "weight", "l2": 5.0 + rank} for n in "abc"]
            write_trace(tmp_path / "t", steps(20, *records), rank=rank)

        assert "shards" in reason(tmp_path / "t", "ranks-disagree")

    def test_a_shard_among_copies_is_not_compared(self, tmp_path):
        for rank in range(2):
            records = [{"layer": n, "kind": "param", "path": "weight", "l2": 5.0 + rank * (n == "a")} for n in "abc"]
            write_trace(tmp_path / "t", steps(20, *records), rank=rank)

        assert look(tmp_path / "t", "ranks-disagree") == []

    def test_the_rank_whose_activations_are_of_another_scale(self, tmp_path):
        path = self.ranks(tmp_path / "t", 5.0, lambda s: 5.0 if s < 8 else 500.0, 5.5, kind="output")

        assert look(path, "rank-outlier") == [("b", "output", 8, 19)]

    def test_of_two_ranks_none_is_the_outlier(self, tmp_path):
        assert "three ranks" in reason(self.ranks(tmp_path / "t", 5.0, 500.0, kind="output"), "rank-outlier")


def test_a_rule_that_lacks_what_it_needs_says_so(tmp_path):
    path = write_trace(tmp_path / "t", steps(20, {"layer": "a", "dtype": "int64"}))

    report = examine(replay.open(path))

    assert report.findings == []
    assert report.not_applicable["constant-output"] == "no output in floating point was recorded"
    assert "it needs records of kind grad_output" in report.not_applicable["vanishing-gradients"]
    assert "rec.log(loss=…)" in report.not_applicable["loss-spike"]
    assert sorted([*report.quiet, *report.not_applicable]) == sorted(rule.name for rule in RULES)
