"""Batches out of traces: what is trained on, what is aligned, what a hint is. Through to one step of all channels."""

from dataclasses import replace

import pytest
import torch
from composer.collate import HINT, Collator, hints_of, tools_of
from composer.data import HeldOut, make_collator, synthetic_states
from composer.losses import IGNORED, compose_loss, response_log_probs
from composer.model import make_tokenizer
from composer.traces import TraceState, action_text
from composer_batches import frozen, pairs_against, recorded_states, small_model

TOKENIZER = make_tokenizer()


def text_of(ids: torch.Tensor) -> str:
    return str(TOKENIZER.decode(ids))


def collator(states: list[TraceState], **options: object) -> Collator:
    return Collator(TOKENIZER, tools_of(states), **options)  # type: ignore[arg-type]


# -- one step of everything -------------------------------------------------------------------------------------------


def states_of(kind: str) -> list[TraceState]:
    return recorded_states() if kind == "recorded" else synthetic_states(1, 2)


@pytest.mark.parametrize("kind", ["recorded", "synthetic"])
def test_a_session_becomes_one_step_of_all_three_channels(kind: str):
    states, model = states_of(kind), small_model()
    hints, pairs = hints_of(states), pairs_against(states)
    hinted = [state for state in states if state.id in hints][:3]
    batch = collator(states, max_length=256, reference=frozen(model))(hinted, hints, pairs[:2])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = compose_loss(model, batch, alpha_sdpo=0.5, beta_replay=0.2, strict=True)
    loss.total.backward()
    optimizer.step()
    assert loss.active == {"lm_ce", "sdpo_jsd", "trace_replay_dpo"}
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recorded", "synthetic"])
def test_only_the_action_is_trained_on(kind: str):
    states = states_of(kind)
    batch = collator(states, max_length=4000)(states, {})
    for row, state in enumerate(states):
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        assert text_of(ids[labels != IGNORED]) == action_text(state.student_action) + "<|im_end|>"
        assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])
        whole = text_of(ids[ids != TOKENIZER.pad_token_id])
        assert whole.startswith("<|im_start|>system\n# Tools\n") and state.task in whole
        assert "reasoning" not in whole


def test_aligned_positions_have_the_same_next_token_after_another_context():
    states = recorded_states()
    hints = hints_of(states)
    batch = collator(states, max_length=4000)(states, hints)
    own, other = batch["sdpo_student_index"], batch["sdpo_teacher_index"]
    assert torch.equal(own >= 0, other >= 0)
    for row, state in enumerate(states):
        pairs = own[row] >= 0
        assert bool(pairs.any()) == (state.id in hints)
        if state.id in hints:
            student = batch["input_ids"][row][own[row][pairs] + 1]
            teacher = batch["ctx_teacher_input_ids"][row][other[row][pairs] + 1]
            assert text_of(student) == text_of(teacher) == action_text(state.student_action) + "<|im_end|>"
            assert HINT + hints[state.id] in text_of(batch["ctx_teacher_input_ids"][row])
            assert not torch.equal(own[row][pairs], other[row][pairs])


def test_a_hint_is_what_followed_in_the_same_session():
    states = recorded_states()
    hints = hints_of(states)
    said = [hints.get(state.id) for state in states]
    assert (
        said[0] == "     1→def rounded(x):\n     2→    return int(x * 100 + .5) / 100\ntests/test_prices.py:4\n[image]"
    )
    assert said[1] is not None and said[1].startswith("<tool_use_error>File has been modified")
    assert said[3] is None  # the session was compacted after it
    assert said[-1] is None
    assert hints_of(states, most=5)[states[0].id] == "     "


def test_a_long_context_loses_its_beginning_and_no_token_of_the_response():
    states = recorded_states()
    short, whole = collator(states, max_length=200), collator(states, max_length=4000)
    for state in states:
        cut, full = (each.encode(state.messages, state.student_action) for each in (short, whole))
        assert len(cut.ids) == min(200, len(full.ids)) and cut.length == min(100, full.length)
        assert cut.ids[cut.start :] == full.ids[full.start :][: cut.length]
        assert cut.ids[: cut.start] == full.ids[: full.start][-cut.start :]


def test_preferences_hold_the_references_log_probabilities():
    model = small_model(3)
    states = recorded_states()
    pairs = pairs_against(states)[:2]
    batch = collator(states, max_length=256, reference=frozen(model)).preferences(pairs)
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
        expected = response_log_probs(model(input_ids=ids).logits, ids, mask)
        assert torch.allclose(batch[f"dpo_{side}_ref_logprobs"], expected)
        assert not batch[f"dpo_{side}_ref_logprobs"].requires_grad
    assert text_of(batch["dpo_chosen_input_ids"][0][batch["dpo_chosen_response_mask"][0] == 1]).startswith("I ask")
    plain = collator(states).preferences(pairs)
    assert not [key for key in plain if "ref" in key]


def test_a_pair_that_differs_only_where_it_is_cut_off_is_refused():
    states = recorded_states()
    same = replace(pairs_against(states)[0], chosen="a" * 40 + "b", rejected="a" * 40 + "c")
    with pytest.raises(ValueError, match="the same in their first 30 tokens: raise max_length=60"):
        collator(states, max_length=60).preferences([same])
    assert collator(states, max_length=200).preferences([same])


def test_a_template_that_rewrites_the_conversation_is_refused():
    rewriting = make_tokenizer()
    rewriting.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    state = recorded_states()[0]
    with pytest.raises(ValueError, match="rewrites the conversation"):
        Collator(rewriting).encode(state.messages, state.student_action)


def test_tools_are_those_that_were_called_with_their_arguments():
    tools = {
        each["function"]["name"]: each["function"]["parameters"]["properties"] for each in tools_of(recorded_states())
    }
    assert list(tools) == ["Bash", "Edit", "Grep", "Read"]
    assert list(tools["Edit"]) == ["file_path", "new_string", "old_string"]


def test_held_out_scores_are_the_loss_of_each_item():
    model, heldout = small_model(), HeldOut(make_collator(max_length=256), [0, 1, 2, 5])
    scores = heldout.losses(model, [0, 1, 2, 5])
    assert scores == pytest.approx([heldout.losses(model, [item])[0] for item in (0, 1, 2, 5)], abs=1e-5)
    assert len(set(scores)) == 4 and heldout.losses(model, []) == []
    assert heldout.likelihoods(model, [0]) == pytest.approx([2.718281828 ** -scores[0]], rel=1e-5)
