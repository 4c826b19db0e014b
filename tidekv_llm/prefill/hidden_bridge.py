"""The hidden-state bridge between layers (paper, section 5): prompt-wide, its slots reused by every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunks import Chunk
from tidekv_llm.prefill.copies import Copier, Ticket, make_copier


def make_bridge(where: str, batch: int, chunks: Sequence[Chunk], decoder: Decoder) -> HiddenBridge:
    """A bridge on the ``"device"``, or on the ``"host"`` for a device with little memory."""
    far = where == "host" and any(device.type != "cpu" for device in decoder.devices)  # a CPU's device is its host
    return (HostBridge if far else HiddenBridge)(batch, chunks, decoder)


class HiddenBridge:
    """Hidden states of the prompt positions [first, S); a chunk's output replaces its input.

    Args:
        batch: B.
        chunks: what will be read and written, from the first slot to the last; what comes before is in a store.
        decoder: whose hidden states they are.
    """

    def __init__(self, batch: int, chunks: Sequence[Chunk], decoder: Decoder) -> None:
        self._first, self._device = chunks[0].start, decoder.device
        self._slots = self._allocate((batch, chunks[-1].stop - self._first, decoder.hidden_size), decoder.dtype)

    def _allocate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _slot(self, chunk: Chunk) -> Tensor:
        return self._slots[:, chunk.start - self._first : chunk.stop - self._first]

    def read(self, chunk: Chunk, device: torch.device, ahead: Chunk | None = None) -> Tensor:
        """Input of a chunk, [B, C, d_model], for a layer on ``device``.

        It is valid until the next but one is read. ``ahead`` is the chunk that will be read next in this layer.
        """
        return self._slot(chunk)

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        """Put a chunk's output where its input was."""
        self._slot(chunk).copy_(hidden)

    def last(self) -> Tensor:
        """Hidden state of the last position [B, 1, d_model], a copy: the bridge can be released."""
        return self._slots[:, -1:].clone()

    def all(self) -> Tensor:
        """Hidden states of all positions [B, S - first, d_model]."""
        return self._slots

    @property
    def nbytes(self) -> int:
        """B * S * d_model * element size (the hidden term of Eq. 9)."""
        return self._slots.nbytes


class HostBridge(HiddenBridge):
    """Hidden states in pinned host memory, with copies that overlap the computation.

    A chunk's input is fetched while the chunk before it is computed: a device holds two inputs and one output on its
    way back, in buffers that are there from its first chunk on. Layers on several devices have a lane each.

    Args:
        batch: B.
        chunks: as for :class:`HiddenBridge`.
        decoder: as for :class:`HiddenBridge`.
        copier_for: makes what copies to and from a device.
    """

    def __init__(
        self,
        batch: int,
        chunks: Sequence[Chunk],
        decoder: Decoder,
        copier_for: Callable[[torch.device], Copier] = make_copier,
    ) -> None:
        super().__init__(batch, chunks, decoder)
        self._longest = max(chunk.stop - chunk.start for chunk in chunks)
        self._copier_for = copier_for
        self._lanes: dict[torch.device, _Lane] = {}
        self._written: list[tuple[Chunk, Ticket]] = []

    def _allocate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def read(self, chunk: Chunk, device: torch.device, ahead: Chunk | None = None) -> Tensor:
        lane = self._lane(device)
        if chunk not in lane.coming:
            self._fetch(lane, chunk)
        hidden = lane.receive(chunk)
        if ahead is not None:
            self._fetch(lane, ahead)
        return hidden

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        ticket = self._lane(hidden.device).send(hidden, self._slot(chunk))
        self._written = [(slots, old) for slots, old in self._written if not _overlap(slots, chunk)]
        self._written.append((chunk, ticket))

    def last(self) -> Tensor:
        self._settle()
        return super().last().to(self._device)

    def all(self) -> Tensor:
        self._settle()
        return self._slots.to(self._device)

    def _fetch(self, lane: _Lane, chunk: Chunk) -> None:
        lane.fetch(chunk, self._slot(chunk), [ticket for slots, ticket in self._written if _overlap(slots, chunk)])

    def _settle(self) -> None:
        for _, ticket in self._written:
            ticket.synchronize()

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            like = self._slots.new_empty((3, self._slots.shape[0], self._longest, self._slots.shape[2]), device=device)
            self._lanes[device] = _Lane(self._copier_for(device), *like)
        return self._lanes[device]


class _Lane:
    """One device's way to the host bridge.

    Args:
        copier: asks for the copies.
        even: buffer [B, C, d_model] for every other input, C the longest chunk.
        odd: buffer for the inputs between them.
        back: buffer for an output on its way back.
    """

    def __init__(self, copier: Copier, even: Tensor, odd: Tensor, back: Tensor) -> None:
        self._copier, self._inputs, self._back = copier, [even, odd], back
        self._sent: Ticket = copier.mark()
        self.coming: dict[Chunk, tuple[Tensor, Ticket]] = {}

    def fetch(self, chunk: Chunk, slot: Tensor, written: Sequence[Ticket]) -> None:
        """Begin to copy ``slot`` to the device, after it was ``written``.

        The buffer held the input of the chunk before the one being computed, which is asked for by now.
        """
        self._inputs.reverse()
        target = self._inputs[0][:, : slot.shape[1]]
        self.coming[chunk] = target, self._copier.copy(target, slot, (self._copier.mark(), *written))

    def receive(self, chunk: Chunk) -> Tensor:
        """The fetched chunk [B, C, d_model], there for what is computed from now on."""
        hidden, ticket = self.coming.pop(chunk)
        self._copier.wait(ticket)
        return hidden

    def send(self, hidden: Tensor, slot: Tensor) -> Ticket:
        """Begin to copy an output [B, C, d_model] to its slot."""
        self._copier.wait(self._sent)
        staged = self._back[:, : hidden.shape[1]]
        staged.copy_(hidden)
        self._sent = self._copier.copy(slot, staged, (self._copier.mark(),))
        return self._sent


def _overlap(one: Chunk, other: Chunk) -> bool:
    return one.start < other.stop and other.start < one.stop
