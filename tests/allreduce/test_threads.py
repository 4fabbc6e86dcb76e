"""Arithmetic in threads of our own: torch gives each one thread, and the bits are those of one thread."""

import threading

import pytest
import torch

from diloco_orchestrator.allreduce.threads import in_threads, one_torch_thread, workers


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_new_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_as_many_calls_run_at_once_as_torch_uses_threads_and_each_has_one():
    all_run, elsewhere = threading.Barrier(3, timeout=30), []

    def call() -> tuple[int, bool]:
        if all_run.wait() == 0:
            elsewhere.append(in_a_new_thread(torch.get_num_threads))
        all_run.wait()
        return torch.get_num_threads(), torch.is_grad_enabled()

    assert in_threads([call] * 3) == [(1, False)] * 3
    assert elsewhere == [3]  # such as a thread of the user's
    assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == 3 and torch.is_grad_enabled()


def test_one_torch_thread_leaves_the_number_of_workers_and_ends_with_its_block():
    with pytest.raises(ValueError), one_torch_thread():
        with one_torch_thread():
            assert (torch.get_num_threads(), workers()) == (1, 3)
        assert (torch.get_num_threads(), workers()) == (1, 3)
        raise ValueError
    assert (torch.get_num_threads(), workers()) == (3, 3)


def test_after_an_interrupt_no_further_call_begins():
    interrupted, ran = threading.Event(), []

    def call() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        interrupted.wait(30)
        ran.append(threading.get_ident())

    with pytest.raises(KeyboardInterrupt):
        in_threads([call] * 50)
    interrupted.set()  # those that had begun end, and find no other call
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and thread.daemon]
    for thread in others:
        thread.join(30)
    assert len(ran) <= 4
