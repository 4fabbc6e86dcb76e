"""The losses of the composer example: golden figures of the papers' formulas, limits, bad input."""

import math
import re
from pathlib import Path

import pytest
import torch
from composer.losses import (
    TAIDScheduler,
    dpo_loss,
    entropy_opd_loss,
    generalized_jsd,
    response_log_probs,
    simpo_loss,
    taid_loss,
)

# Student and teacher logits and a mask; the golden figures below were computed for them with upstream's code.
_SEVEN = torch.Generator().manual_seed(7)
S = torch.randn(2, 5, 11, generator=_SEVEN)
T = torch.randn(2, 5, 11, generator=_SEVEN) * 1.5
M = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
LOSSES = [2, 1.8, 1.7, 1.75, 1.5, 1.4, 1.39, 1.2, 1.2, 1.1]
OF_TOKENS = [
    pytest.param(generalized_jsd, id="jsd"),
    pytest.param(lambda s, t, m: taid_loss(s, t, m, 0.4), id="taid"),
    pytest.param(entropy_opd_loss, id="entropy-opd"),
]


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


# -- golden figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "temperature", "golden"),
    [
        (0, 1, 1.313735),
        (0.1, 1, 0.106374),
        (0.5, 1, 0.267630),
        (0.5, 2, 0.100451),
        (0.9, 1, 0.113601),
        (1, 1, 1.576047),
    ],
)
def test_generalized_jsd_has_upstreams_figures(beta: float, temperature: float, golden: float):
    assert generalized_jsd(S, T, M, beta, temperature).item() == close(golden)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.slow
def test_generalized_jsd_is_that_of_trl_where_trl_is_installed(beta: float):
    """TRL sums over tokens with its own labels; -100 marks what does not count."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="the extra [trl] is not installed")
    labels = torch.where(M.bool(), 0, -100)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(S, T, labels=labels, beta=beta, reduction="batchmean")
    assert generalized_jsd(S, T, M, beta).item() == close(theirs.item())


@pytest.mark.parametrize(
    ("t", "golden"), [(0, 2.018874), (0.1, 2.077302), (0.4, 2.318850), (0.5, 2.412984), (0.9, 2.765455), (1, 2.838742)]
)
def test_taid_has_upstreams_figures(t: float, golden: float):
    assert taid_loss(S, T, M, t).item() == close(golden)


@pytest.mark.parametrize(("h_max", "golden"), [(None, 1.476684), (0.5, 1.372169)])
def test_gated_entropy_opd_has_its_figures(h_max: float | None, golden: float):
    assert entropy_opd_loss(S, T, M, h_max).item() == close(golden)


def test_entropy_opd_is_forward_kl_for_a_uniform_teacher_and_reverse_kl_for_a_peaked_one():
    student, one = torch.tensor([[[0.2, -0.3, 0.5, 0.1]]]), torch.ones(1, 1)
    uniform, peaked = torch.zeros(1, 1, 4), torch.tensor([[[20.0, 0.0, 0.0, 0.0]]])
    assert entropy_opd_loss(student, uniform, one).item() == close(0.039691)
    assert generalized_jsd(student, uniform, one, beta=0).item() == close(0.039691)
    assert entropy_opd_loss(student, peaked, one).item() == close(13.472217)
    assert entropy_opd_loss(uniform, uniform, one).item() == close(0.0)


def test_the_additive_form_adds_forward_kl_where_the_teacher_is_uncertain():
    forward, reverse = (generalized_jsd(S, T, M, beta=beta) for beta in (0, 1))
    assert entropy_opd_loss(S, T, M, form="additive", tau=-1.0).item() == close((forward + reverse).item())
    assert entropy_opd_loss(S, T, M, form="additive", tau=math.log(11)).item() == close(reverse.item())


def test_dpo_and_simpo_have_their_figures():
    sums = [torch.tensor([each]) for each in (-12.0, -15.0, -13.0, -14.5)]
    assert dpo_loss(*sums, beta=0.1).item() == close(0.620957)
    assert simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), beta=2, gamma=1).item() == close(0.693147)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_simpo_is_that_of_trl_where_trl_is_installed():
    cpo = pytest.importorskip("trl.experimental.cpo", reason="the extra [trl] is not installed")
    trainer = object.__new__(cpo.CPOTrainer)
    trainer.alpha = 0.0
    trainer.loss_type, trainer.beta, trainer.simpo_gamma, trainer.label_smoothing = "simpo", 2.0, 0.5, 0.0
    trainer.accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    chosen, rejected = torch.tensor([-1.0, -0.3]), torch.tensor([-1.5, -0.4])
    theirs = trainer.cpo_loss(chosen, rejected)[0].mean()
    assert simpo_loss(chosen, rejected, beta=2.0, gamma=0.5).item() == close(theirs.item())


def taken(scheduler: TAIDScheduler) -> list[float]:
    return [scheduler.update_t(loss, step) for step, loss in enumerate(LOSSES)]


def test_the_taid_schedule_has_upstreams_figures():
    scheduler = TAIDScheduler(100_000)
    assert taken(scheduler)[-1] == pytest.approx(0.40135074, abs=3e-8)  # upstream's is a number of single precision
    assert scheduler.momentum == pytest.approx(0.00540495, abs=1e-8)
    assert taken(TAIDScheduler(100)) == pytest.approx([0.4 + 0.006 * step for step in range(10)])
    assert taken(TAIDScheduler(10, disable_adaptive=True)) == pytest.approx([0.4 + 0.06 * step for step in range(10)])


def test_the_taid_schedule_goes_on_after_a_restart_and_ignores_a_step_it_has_seen():
    straight, restarted = TAIDScheduler(100_000), TAIDScheduler(100_000)
    for step, loss in enumerate(LOSSES):
        straight.update_t(loss, step)
        fresh = TAIDScheduler(100_000)
        fresh.load_state_dict(restarted.state_dict())
        fresh.update_t(loss, step)
        fresh.update_t(9.0, step)
        restarted = fresh
    assert restarted.state_dict() == straight.state_dict()


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
def test_equal_distributions_have_no_divergence(beta: float):
    assert abs(generalized_jsd(S, S, M, beta).item()) < 1e-7


def test_taid_at_zero_pulls_nowhere_whoever_the_teacher_is():
    student = S.clone().requires_grad_()
    taid_loss(student, T, M, 0.0).backward()
    assert student.grad is not None and student.grad.abs().max() <= 1e-8
    assert taid_loss(S, T, M, 0.0) == taid_loss(S, -T, M, 0.0)


def test_taid_leaves_out_entries_that_the_student_excludes():
    student, teacher = S.clone(), T.clone()
    student[..., 3] = -math.inf
    for t in (0, 0.4, 1):
        assert taid_loss(student, teacher, M, t).isfinite()


@pytest.mark.parametrize("loss", OF_TOKENS)
def test_the_teacher_gets_no_gradient_and_masked_tokens_neither(loss):
    student, teacher = S.clone().requires_grad_(), T.clone().requires_grad_()
    loss(student, teacher, M).backward()
    assert teacher.grad is None and student.grad is not None
    norms = student.grad.norm(dim=-1)
    assert (norms[M == 1] > 0).all() and (norms[M == 0] == 0).all()


@pytest.mark.parametrize("loss", OF_TOKENS)
def test_halves_are_computed_in_single_precision(loss):
    found = loss(S.bfloat16(), T.bfloat16(), M)
    assert found.dtype == torch.float32
    assert found == loss(S.bfloat16().float(), T.bfloat16().float(), M)


def test_a_clip_bounds_each_entry_before_the_sum():
    free = [generalized_jsd(S, T, M, 0.5, token_clip=clip).item() for clip in (None, 100.0, 0.01, 0.0)]
    assert free[0] == free[1] > free[2] > free[3] == 0


def test_preference_losses_fall_as_the_responses_part():
    zero = torch.zeros(1)
    dpo = [dpo_loss(torch.tensor([x]), zero, zero, zero).item() for x in (-2.0, 0.0, 2.0)]
    simpo = [simpo_loss(torch.tensor([x]), zero).item() for x in (-2.0, 0.0, 2.0)]
    assert dpo[0] > dpo[1] > dpo[2] and simpo[0] > simpo[1] > simpo[2]
    assert dpo[1] == close(math.log(2))


def test_log_probabilities_of_responses_are_summed_or_averaged_over_the_mask():
    logits, ids = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([[1, 2, 3, 4]] * 2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])  # the first token of a sequence is predicted by nothing
    p = logits.log_softmax(-1)
    expected = torch.stack([p[0, 1, 3] + p[0, 2, 4], p[1, 0, 2]])
    assert torch.allclose(response_log_probs(logits, ids, mask), expected)
    assert torch.allclose(response_log_probs(logits, ids, mask, average=True), expected / torch.tensor([2.0, 1.0]))


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", OF_TOKENS)
def test_shapes_that_differ_are_named_and_an_empty_mask_is_refused(loss):
    with pytest.raises(ValueError, match=re.escape("(2, 5, 11), teacher logits (2, 5, 10)")):
        loss(S, T[..., :10], M)
    with pytest.raises(ValueError, match=re.escape("mask is (2, 4) for logits (2, 5, 11)")):
        loss(S, T, M[:, :4])
    with pytest.raises(ValueError, match="no token to average over"):
        loss(S, T, torch.zeros_like(M))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: generalized_jsd(S, T, M, beta=1.5), r"beta=1.5 is not in \[0, 1\]"),
        (lambda: generalized_jsd(S, T, M, temperature=0), "temperature=0 is not above 0"),
        (lambda: taid_loss(S, T, M, t=-0.1), r"t=-0.1 is not in \[0, 1\]"),
        (lambda: entropy_opd_loss(S, T, M, h_max=0), "h_max=0 is not above 0"),
        (lambda: entropy_opd_loss(S, T, M, form="additive"), "needs tau"),
        (lambda: entropy_opd_loss(S, T, M, form="gatd"), "Did you mean 'gated'"),  # type: ignore[arg-type]
        (lambda: dpo_loss(*[torch.zeros(n) for n in (2, 2, 3, 2)]), r"chosen is \(2,\), chosen_ref \(3,\)"),
        (lambda: simpo_loss(torch.zeros(2), torch.zeros(1)), r"chosen is \(2,\), rejected \(1,\)"),
        (lambda: TAIDScheduler(0), "num_train_steps=0 is not above 0"),
        (lambda: TAIDScheduler(9, t_end=1.1), "t_end=1.1"),
        (lambda: TAIDScheduler(9).update_t(math.nan, 3), "loss=nan at step 3 is not finite"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_response_without_a_token_is_refused_with_its_pair():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match="response of pair 1 has no token"):
        response_log_probs(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), mask)


# -- one source of truth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", ["logsigmoid(", "logaddexp(", "log_softmax(student", "_kl_terms("])
def test_every_formula_is_written_once(formula: str, examples: Path):
    users = {path.name for path in (examples / "composer").glob("*.py") if formula in path.read_text()}
    assert users == {"losses.py"}
