"""What a weight may lie in memory as, other than as itself: a form that dense numbers can be made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

FORMS = "tidekv_forms"


class Form(nn.Module):
    """A weight as it is stored. What it holds are buffers, so that a model's bytes and devices count them."""

    @abstractmethod
    def make(self, out: Tensor) -> None:
        """Write the dense weight into ``out``, of its shape and any floating dtype."""


def forms_of(module: nn.Module) -> Mapping[str, Form]:
    """The forms of a module's parameters by name; a parameter without one is stored as it is."""
    return cast(Mapping[str, Form], getattr(module, FORMS, {}))
