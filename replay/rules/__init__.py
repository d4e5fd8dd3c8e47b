"""The rules of this package, in the order in which `docs/check.md` lists them."""

from replay.rules.activations import (
    activation_drift,
    constant_output,
    dead_relu,
    input_outlier,
    saturated,
)
from replay.rules.gradients import exploding_gradients, gradient_spike, not_learning, vanishing_gradients
from replay.rules.learning import large_updates, loss_not_falling, loss_spike, small_updates, untied_weights
from replay.rules.numbers import half_overflow, half_underflow, non_finite, skipped_steps
from replay.rules.ranks import rank_outlier, ranks_disagree

RULES = (
    non_finite,
    half_overflow,
    half_underflow,
    skipped_steps,
    vanishing_gradients,
    exploding_gradients,
    gradient_spike,
    not_learning,
    dead_relu,
    saturated,
    constant_output,
    activation_drift,
    input_outlier,
    large_updates,
    small_updates,
    untied_weights,
    loss_not_falling,
    loss_spike,
    ranks_disagree,
    rank_outlier,
)
