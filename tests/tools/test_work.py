from __future__ import annotations

import torch

from tests.tools.work import Work


def test_reads_and_writes_are_counted_and_views_are_not() -> None:
    left, right = torch.ones(10, 4), torch.ones(4)
    with Work() as work:
        view = left[2:8].transpose(0, 1).reshape(4, 6)  # a copy would be counted
        assert view._base is not None
        assert (work.moved_bytes, work.launches) == (0, 0)
        left + right
    assert work.launches == 1
    assert work.moved_bytes == 4 * (40 + 4 + 40)


def test_an_expanded_tensor_counts_once_and_a_factorys_model_not_at_all() -> None:
    row = torch.ones(1, 5)
    with Work() as work:
        row.expand(100, 5).sum()
        assert work.moved_bytes == 4 * (5 + 1)
        row.new_zeros(3)
    assert work.moved_bytes == 4 * (5 + 1 + 3)


def test_in_place_work_counts_what_it_reads_and_writes() -> None:
    values = torch.ones(8)
    with Work() as work:
        values.mul_(2)
    assert (work.launches, work.moved_bytes) == (1, 4 * 16)
