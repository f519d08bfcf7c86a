"""Buffers of weights, and the fingerprint that sender and receivers compare."""

import pytest
import torch

from classroom_rl.engines.vllm.weight_stream import Receiver, buffers_of, checksum, packed, send
from classroom_rl.models.weight_transfer import TensorInfo

CPU = torch.device("cpu")
BUFFER_BYTES = 1000


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several types, one without elements, and one that is larger than a buffer."""
    torch.manual_seed(version)
    return {
        "a": torch.randn(5, 7),
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(version),
        "d": torch.randn(20, 30).half().T,
        "e": torch.empty(0, 4),
        "f": torch.randn(101),
    }


def infos_of(weights: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in weights.items()
    ]


class Wire:
    """A group of two processes that are one: what rank 0 has broadcast is then received.

    Args:
        damaged: the number of a broadcast in which the receiver gets another bit.
    """

    def __init__(self, damaged: int | None = None):
        self.broadcasts: list[torch.Tensor] = []
        self.received: int | None = None
        self._damaged = damaged

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if self.received is None:
            self.broadcasts.append(tensor.clone())
            return
        tensor.copy_(self.broadcasts[self.received])
        if self.received == self._damaged:
            tensor[-1] ^= 1
        self.received += 1

    def destroy(self) -> None: ...


def sent(wire: Wire, version: int = 1) -> str:
    weights = weights_of(version)
    tensors = infos_of(weights)
    return send(packed([weights], tensors, BUFFER_BYTES, CPU), tensors, wire, CPU)


def test_what_is_received_is_what_was_sent() -> None:
    wire = Wire()
    fingerprint = sent(wire)
    wire.received = 0
    receiver = Receiver(infos_of(weights_of(1)), BUFFER_BYTES, wire, CPU)
    for (name, tensor), (expected, weight) in zip(receiver, weights_of(1).items(), strict=True):
        assert name == expected and tensor.dtype == weight.dtype and torch.equal(tensor, weight)
    assert receiver.check() == fingerprint == sent(Wire()) != sent(Wire(), 2)


def test_damaged_weights_are_refused() -> None:
    sent(complete := Wire())
    for damaged in range(len(complete.broadcasts)):  # the last one is the fingerprint
        sent(wire := Wire(damaged))
        wire.received = 0
        receiver = Receiver(infos_of(weights_of(1)), BUFFER_BYTES, wire, CPU)
        assert len(list(receiver)) == 6
        with pytest.raises(RuntimeError, match="the trainer sent weights [0-9a-f]{32}, and [0-9a-f]{32} arrived"):
            receiver.check()


def test_more_weights_than_were_announced_are_not_sent() -> None:
    with pytest.raises(ValueError, match="f came, which was not announced"):
        list(packed([weights_of(1)], infos_of(weights_of(1))[:-1], BUFFER_BYTES, CPU))


def test_buffers_hold_all_tensors_in_order_where_their_types_may_begin() -> None:
    infos = infos_of(weights_of(0))
    for most in (1, 100, 1000, 10**6):
        plans = list(buffers_of(infos, most))
        assert [info for plan in plans for info in plan.tensors] == infos
        assert all(start % 8 == 0 for plan in plans for start in plan.starts)
        assert all(plan.size <= most or len(plan.tensors) == 1 for plan in plans)


def test_a_checksum_depends_on_every_byte_and_its_place() -> None:
    """It is what GPUs compute; here on the CPU, over more than one block."""
    torch.manual_seed(0)
    buffer = torch.randint(0, 256, (9_000_003,), dtype=torch.uint8)
    sums = {checksum(buffer).item()}
    for index in (0, 7, 8, 4_000_000, 8_999_999, 9_000_002):
        for bit in (1, 128):
            changed = buffer.clone()
            changed[index] ^= bit
            sums.add(checksum(changed).item())
    for one, other in ((0, 8), (15, 8_400_015)):  # the same bit of two words: signs of two weights
        changed = buffer.clone()
        changed[[one, other]] ^= 128
        sums.add(checksum(changed).item())
    swapped = buffer.clone()
    swapped[:8], swapped[8:16] = buffer[8:16], buffer[:8]
    assert len(sums | {checksum(swapped).item()}) == 1 + 12 + 2 + 1
    assert checksum(buffer.clone()) == checksum(buffer)
